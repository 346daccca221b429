"""DraftModelDrafter: a small model that drafts for a large one, with paged KV of its own.

Knows nothing of verification but whether it must say what its drafts were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.compute.drafters.draft_chain import ChainRunner, draw_chains
from engine.compute.drafters.draft_kv import DraftKv
from engine.compute.drafters.draft_lanes import DraftLane, DraftLanes
from engine.compute.drafters.draft_sequence import (
    DraftSequence,
    depends_on_newest_only,
    has_ended,
    sampling_inputs,
    up_to_the_end,
)
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.device import in_stream
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.following_steps import UnreadRows
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.row_groups import in_groups
from engine.compute.sampling.sampler import Sampler, select_rows
from engine.plan.scheduling.sampling_table import history_of
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, UnreadChains
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import Int64, SampledRows, SamplingInputs, StepInputs

# Small enough that reading a prompt does not delay the other sequences' next tokens for long.
DEFAULT_READ_TOKENS = 512
# The most drafts of one go: a request that ends meanwhile keeps its blocks for so many steps at most.
MAX_CHAIN = 8


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """What a draft model may use. `vocab_size` is the target's; at most `max_read_tokens` are read a call.

    Of each sequence `max_num_lanes` other outcomes may be drafted on for.
    """

    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_read_tokens: int = DEFAULT_READ_TOKENS
    max_num_lanes: int = 0


@dataclass(frozen=True, slots=True)
class OnDevice:
    """How a device that works on by itself drafts: in a stream of its own, whole chains at a time.

    `runner` computes over its own K/V with the same model and draws as the target draws. `stream` None is the
    one that is current anyway.
    """

    runner: ChainRunner
    stream: torch.cuda.Stream | None


class _Turn(NamedTuple):
    """Tokens [first, stop) of one sequence are computed in a call, and if these are all, drafts are drawn.

    There is room for all of them but the last, which is not computed.
    """

    job: DraftJob
    known: DraftSequence
    first: int
    stop: int
    num_drafts: int = 1

    @property
    def draws(self) -> bool:
        """True when nothing is left to read."""
        return self.stop == len(self.known.token_ids)


class _Drawn(NamedTuple):
    """The tokens of a turn that draws; `probs` has the float32 [vocab] rows they came from, if needed."""

    token_ids: tuple[int, ...]
    probs: tuple[torch.Tensor, ...] = ()


class DraftModelDrafter:
    """One call is one forward pass: sequences with known tokens left to read read them, others draw one.

    With `on_device` a call draws all the drafts that are wanted, up to MAX_CHAIN, unless their probabilities
    are needed or the next depends on all that were drafted; the host waits once, and in a stream of its own.
    With `shares_device` the target computes on the same one, and may be told of the drafts before that.

    Drafts go through the whole pipeline of the target's rows: the request's own parameters, with the tokens
    drafted so far as history. Under `match` also the noise is the target's, so that the two models draw the
    same token wherever their distributions allow (Daliri, Musco, Suresh 2024); under the other rules it is a
    stream of its own and every draft comes with its distribution.

    Where lanes are wanted, a call also draws the next token of other outcomes of what is being verified.

    A sequence that does not fit, beside those that are drafted for in the same call, gets no answer and holds
    nothing; one beyond the draft model's context gets none either. One whose row fails, or whose tokens are
    not all known, gets none until it is closed.
    """

    method = "draft_model"
    is_cheap = False
    reads_features = False

    def __init__(
        self,
        loaded: LoadedModel,
        sizes: DraftSizes,
        verification: Verification = "match",
        on_device: OnDevice | None = None,
        *,
        shares_device: bool = True,
    ) -> None:
        self._forward = PackedForward(loaded)
        self._shares_device = shares_device
        self._device = on_device
        self._stream = None if on_device is None else on_device.stream
        # The runner draws for `match` only, and all that the model knows, which the target must know too.
        self._chains = (
            on_device is not None and verification == "match" and loaded.vocab_size <= sizes.vocab_size
        )
        self.is_stepwise = not self._chains
        self._sizes = sizes
        self._verification = verification
        self._sampler = Sampler(sizes.vocab_size, loaded.device)
        tensors = (
            self._forward.make_kv(sizes.num_blocks, sizes.block_size)
            if on_device is None
            else on_device.runner.kv
        )
        # What a lane was drafted from is not told, and only `match` can do without.
        self.max_num_lanes = sizes.max_num_lanes if verification == "match" and on_device is None else 0
        num_rows = sizes.max_num_seqs * (1 + self.max_num_lanes)
        self._kv = DraftKv(tensors, num_rows, loaded.max_model_len)
        self._lanes = DraftLanes(self._kv, loaded.max_model_len)
        self._known: dict[str, DraftSequence] = {}

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self._kv.manager.num_used_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and sequences agree. O(blocks): for tests."""
        self._kv.manager.check_integrity()

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """Tokens for each job that has no more to read. Whatever the forward pass raises comes through."""
        return self._draft(jobs, None)

    def draft_and_tell(self, jobs: Sequence[DraftJob], tell: Callable[[UnreadChains], None]) -> DraftResult:
        """See TellingDrafter: it tells of chains alone, and of none while anyone is behind."""
        return self._draft(jobs, tell if self._shares_device else None)

    @torch.inference_mode()
    def _draft(self, jobs: Sequence[DraftJob], tell: Callable[[UnreadChains], None] | None) -> DraftResult:
        begin = perf_counter()
        behind: set[str] = set()
        with in_stream(self._stream):
            for job in jobs:
                self._take_note(job)
            turns = self._plan(jobs, behind)
            lanes = [lane for turn in turns if turn.draws for lane in self._growing(turn)]
            drawn = self._compute(turns, lanes, None if behind else tell) if turns else {}
        drafts = tuple(self._answer(job, drawn, behind) for job in jobs)
        return DraftResult(drafts, perf_counter() - begin)

    @torch.inference_mode()
    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        with in_stream(self._stream):
            for request_id in request_ids:
                self._known.pop(request_id, None)
                self._lanes.drop(request_id)
                self._kv.drop(request_id)

    def _take_note(self, job: DraftJob) -> None:
        """Make the job's tokens the known ones; KV stays valid as far as they agree with those before."""
        request_id = job.request.request_id
        known = self._known.get(request_id)
        if known is None:
            history = history_of(job.request.sampling, job.request.num_prompt_tokens)
            known = self._known[request_id] = DraftSequence(job.request, [], history)
        old = known.token_ids
        if job.first > len(old):
            known.is_broken = True
            return
        num_equal = job.first
        for before, after in zip(old[job.first :], job.token_ids, strict=False):
            if before != after:
                break
            num_equal += 1
        self._lanes.begin(job, num_equal)
        if known.history is not None:
            known.history.cut(old, num_equal)
        old[job.first :] = job.token_ids
        # Only padding of the target's embeddings can lie outside a vocabulary that is the same.
        known.is_broken |= max(job.token_ids, default=0) >= self._forward.loaded.vocab_size
        # The newest token is always fed (again), for its logits are wanted.
        valid = min(num_equal, len(old) - 1)
        if valid < self._kv.num_computed(request_id):
            self._kv.cut(request_id, valid)

    # Who computes what.

    def _plan(self, jobs: Sequence[DraftJob], behind: set[str]) -> list[_Turn]:
        """The turns of this call, single tokens first; `behind` gets those who need another call to read."""
        current = {job.request.request_id for job in jobs}
        asked = [(job, known) for job in jobs if self._can_go_on(job, known := self._known_of(job))]
        asked.sort(key=lambda entry: self._num_unread(entry[1]) > 1)
        turns: list[_Turn] = []
        budget = max(self._sizes.max_read_tokens, self._sizes.block_size)
        for job, known in asked:
            request_id, num_tokens = job.request.request_id, len(known.token_ids)
            first = self._kv.num_computed(request_id)
            count = min(num_tokens - first, budget)
            if count == 0:
                behind.add(request_id)
                continue
            # Room for all that is known at once: a reader that cannot finish must not begin.
            if not self._kv.make_room(request_id, num_tokens, current):
                continue
            turn = _Turn(job, known, first, first + count)
            budget -= count if count > 1 else 0
            if not turn.draws:
                behind.add(request_id)
            turns.append(turn._replace(num_drafts=self._num_drafts(turn, current)))
        return turns

    def _num_drafts(self, turn: _Turn, current: set[str]) -> int:
        """How many drafts this turn may draw, for which room is made: 1 but for a chain."""
        most = min(turn.job.num_wanted, MAX_CHAIN, self._forward.loaded.max_model_len - turn.stop + 1)
        if not (self._chains and turn.draws and depends_on_newest_only(turn.known)) or most == 1:
            return 1
        has_room = self._kv.extend(turn.job.request.request_id, turn.stop + most - 1, current)
        return most if has_room else 1

    def _can_go_on(self, job: DraftJob, known: DraftSequence) -> bool:
        """True if a token is wanted and the model may draw one."""
        token_ids = known.token_ids
        if job.num_wanted <= 0 or known.is_broken or not token_ids:
            return False
        return len(token_ids) <= self._forward.loaded.max_model_len and not has_ended(
            known.request, token_ids
        )

    def _known_of(self, job: DraftJob) -> DraftSequence:
        return self._known[job.request.request_id]

    def _num_unread(self, known: DraftSequence) -> int:
        return len(known.token_ids) - self._kv.num_computed(known.request.request_id)

    def _growing(self, turn: _Turn) -> list[DraftLane]:
        return self._lanes.growing(turn.job, turn.known) if self.max_num_lanes else []

    # The pass.

    def _compute(
        self,
        turns: Sequence[_Turn],
        lanes: Sequence[DraftLane],
        tell: Callable[[UnreadChains], None] | None,
    ) -> Mapping[str, _Drawn]:
        """Run the turns, and a token of each lane beside them; what the turns drew, by request."""
        try:
            drawing = [turn for turn in turns if turn.draws]
            inputs = self._step_inputs(turns, lanes)
            if self._chains and drawing:
                drawn = self._draw_chains(drawing, inputs, tell)
            else:
                logits = self._forward(inputs, self._kv.tensors)  # [drawing + lanes, draft vocab]
                logits = fit_vocabulary(logits, self._sizes.vocab_size)
                drawn = self._draw(drawing, logits[: len(drawing)]) if drawing else []
                if lanes:
                    self._grow(lanes, logits[len(drawing) :])
        except Exception:
            request_ids = [turn.job.request.request_id for turn in turns]
            self._lanes.drop_suspect(request_ids)
            for request_id in request_ids:  # it is unknown what was written
                self._kv.drop_suspect(request_id)
            raise
        for turn in turns:
            self._kv.advance(turn.job.request.request_id, turn.stop, is_kv_good=turn.draws)
        found: dict[str, _Drawn] = {}
        for turn, result in zip(drawing, drawn, strict=True):
            request_id = turn.job.request.request_id
            if result is None:
                turn.known.is_broken = True
                self._lanes.drop(request_id)
                self._kv.drop_suspect(request_id)
            else:
                turn.known.token_ids += result.token_ids
                # All but the newest were computed to draw it; drafts past an end were dropped again.
                self._kv.advance(request_id, len(turn.known.token_ids) - 1, is_kv_good=True)
                found[request_id] = result
        return found

    def _step_inputs(self, turns: Sequence[_Turn], lanes: Sequence[DraftLane]) -> StepInputs:
        parts = [
            Part(
                turn.known.token_ids,
                turn.first,
                turn.stop,
                self._kv.blocks(turn.job.request.request_id, turn.stop + turn.num_drafts - 1),
            )
            for turn in turns
        ]
        for lane in lanes:
            blocks = self._kv.blocks(lane.lane_id, lane.length)
            parts.append(Part(lane.sequence.token_ids, lane.length - 1, lane.length, blocks))
        inputs = pack_step(parts, self._sizes.block_size)
        draws = [turn.draws for turn in turns] + [True] * len(lanes)
        return replace(inputs, logits_rows=inputs.logits_rows[draws])

    def _draw_chains(
        self, turns: Sequence[_Turn], inputs: StepInputs, tell: Callable[[UnreadChains], None] | None
    ) -> list[_Drawn | None]:
        """All drafts of each turn, up to one that ends the request, None for a row that failed."""
        assert self._device is not None
        inputs = replace(inputs, sampling=sampling_inputs([turn.known for turn in turns]))
        num_drafts = [turn.num_drafts for turn in turns]

        def tell_of(rows: UnreadRows) -> None:
            places = zip(turns, rows.places.tolist(), strict=True)
            own = {turn.job.request.request_id: tuple(row[: turn.num_drafts]) for turn, row in places}
            if tell is not None:
                tell(UnreadChains(rows.tokens, own))

        runner, told = self._device.runner, None if tell is None else tell_of
        chains = draw_chains(runner, inputs, num_drafts, self._sizes.block_size, told)
        return [
            None if chain is None else _Drawn(up_to_the_end(turn.known, chain))
            for turn, chain in zip(turns, chains, strict=True)
        ]

    def _draw(self, turns: Sequence[_Turn], logits: torch.Tensor) -> list[_Drawn | None]:
        """One token a turn, None for a row that failed; `logits` is [turns, vocab]."""
        inputs = sampling_inputs([turn.known for turn in turns])
        if self._verification == "match":
            rows = self._sampler.sample(logits, inputs)
            errors = rows.row_errors or {}
            self._note_seconds(turns, logits, inputs, rows)
            return [None if row in errors else _Drawn((token,)) for row, token in enumerate(rows.token_ids)]
        committed: Int64 = np.array([turn.job.num_committed for turn in turns], np.int64)
        drawn: list[_Drawn | None] = []
        for group in in_groups(len(turns), logits.shape[1]):
            own = select_rows(inputs, np.arange(len(turns))[group])
            drafts = self._sampler.sample_with_probs(logits[group], own, committed[group])
            drawn += [
                None if row in drafts.row_errors else _Drawn((token,), (kept_apart(drafts.probs[row]),))
                for row, token in enumerate(drafts.token_ids)
            ]
        return drawn

    def _note_seconds(
        self, turns: Sequence[_Turn], logits: torch.Tensor, inputs: SamplingInputs, drawn: SampledRows
    ) -> None:
        """Have the lanes know what might have been drawn in place of each token."""
        asked = [row for row, turn in enumerate(turns) if turn.job.num_lanes and self.max_num_lanes]
        for row, token_id in self._seconds(logits, inputs, drawn, asked):
            turn = turns[row]
            self._lanes.note_second(turn.job.request.request_id, len(turn.known.token_ids), token_id)

    def _grow(self, lanes: Sequence[DraftLane], logits: torch.Tensor) -> None:
        """Draw a token for each lane; `logits` is [lanes, vocab]."""
        inputs = sampling_inputs([lane.sequence for lane in lanes])
        rows = self._sampler.sample(logits, inputs)
        for row, token_id in self._seconds(logits, inputs, rows, range(len(lanes))):
            lanes[row].seconds[lanes[row].length] = token_id
        failed = rows.row_errors or {}
        for row, (lane, token_id) in enumerate(zip(lanes, rows.token_ids, strict=True)):
            if row in failed:
                self._lanes.failed(lane)
            else:
                self._kv.advance(lane.lane_id, lane.length, is_kv_good=True)
                lane.sequence.token_ids.append(token_id)

    def _seconds(
        self, logits: torch.Tensor, inputs: SamplingInputs, drawn: SampledRows, rows: Sequence[int]
    ) -> list[tuple[int, int]]:
        """(row, token id) of what the same noise favours, of these rows, beside what was drawn."""
        sound = [row for row in rows if row not in (drawn.row_errors or {})]
        if not sound:
            return []
        at = np.array(sound)
        others = logits[torch.from_numpy(at)]  # [sound rows, vocab], a copy
        first = torch.tensor([drawn.token_ids[row] for row in sound])[:, None]
        others.scatter_(1, first, others.amin(dim=1, keepdim=True))
        found = self._sampler.sample(others, select_rows(inputs, at))
        failed = found.row_errors or {}
        return [
            (row, token_id)
            for place, (row, token_id) in enumerate(zip(sound, found.token_ids, strict=True))
            if place not in failed
        ]

    def _answer(self, job: DraftJob, drawn: Mapping[str, _Drawn], behind: set[str]) -> Draft:
        request_id = job.request.request_id
        found = drawn.get(request_id)
        return Draft(
            request_id,
            job.epoch,
            job.next_position,
            token_ids=() if found is None else found.token_ids,
            probs=() if found is None else found.probs,
            is_behind=request_id in behind,
            lanes=() if found is None else self._lanes.answers(request_id),
        )


def kept_apart(probs: torch.Tensor) -> torch.Tensor:
    """A copy: a row of all that drew at once would keep those of the others as long as its draft is there."""
    copy = probs.clone()
    if copy.is_cuda:  # the target reads it in its own stream, after it is freed here
        copy.record_stream(torch.cuda.default_stream(copy.device))
    return copy


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [rows, vocab_size] from those of a model whose embeddings are padded to another size."""
    missing = vocab_size - logits.shape[1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]
