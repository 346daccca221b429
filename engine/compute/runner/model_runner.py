"""Runs the scheduler's steps on the device: scheduled tokens in, drawn tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, product

import numpy as np
import torch

from engine.compute.attention.swap_tensors import SwapTensors
from engine.compute.attention.tree_mask import accepted_moves
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.device import failures_named, mark, seconds_between
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.isolated_draw import draw_isolated
from engine.compute.runner.kv_memory import KvMemory
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.prompt_scorer import PromptScorer
from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verified import Verified
from engine.compute.verification.verifier import make_verifier
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import BlockMoves, Int32, Int64, SampledRows, StepInputs, StepResult

_WARM_UP_TOKENS = 64
_WARM_UP_SEQUENCES = 8
_WARM_UP_VERIFIED = 5
_SHORT = 64  # rows of a sequence: no fewer than its newest token and drafts may be


@dataclass(frozen=True, slots=True)
class ForDrafts:
    """What drafts need of the runner: the rule they are judged by, and whether drafters read the target.

    `keeps_features` has each result carry what those need: what enters `feature_layers` at every verified
    position, or, where none are named, what the head read where each sequence's newest token was drawn. Of
    a long part of a prompt the last `feature_window` positions will do.
    """

    verification: Verification = "match"
    keeps_features: bool = False
    feature_layers: tuple[int, ...] = ()
    feature_window: int = 1

    def held_bytes(self, loaded: LoadedModel, num_seqs: int, max_drafts: int) -> int:
        """The most that so many sequences hold of what drafters read of `loaded`, between two steps.

        One that no drafter is asked about holds the run of positions that was taken last, and those behind it
        (see NewFeatures): behind the oldest of these less than `feature_window` tokens were computed. Before
        a prompt is through nothing is taken, so that one run at most is a part of a prompt, and no other has
        more than _SHORT rows. That makes max(feature_window, _SHORT) + (feature_window - 1) + _SHORT rows,
        each with a hidden state of each layer.

        Where no layers are named there are no runs: the newest row of a sequence holds all that its step
        judged, 1 + `max_drafts` rows of each, and so does the one that was taken last. That makes two steps.
        """
        if not self.keeps_features:
            return 0
        num_rows, width = 2 * (1 + max_drafts), 1
        if self.feature_layers:
            num_rows = max(self.feature_window, _SHORT) + self.feature_window - 1 + _SHORT
            width = len(self.feature_layers)
        row_bytes = width * int(loaded.config.hidden_size) * loaded.dtype.itemsize
        return num_seqs * num_rows * row_bytes

    def parts(self, hidden: torch.Tensor, inputs: StepInputs) -> Sequence[torch.Tensor]:
        """`hidden`, which is as PackedForward gives it, by sequences; as it is where no layers are named.

        By sequences they are copies: what is drafted for later would keep the whole pass in memory.
        """
        if not self.feature_layers:
            return [hidden]
        return rows_apart(hidden, inputs.query_lens, self.feature_window)

    def features(
        self, parts: Sequence[torch.Tensor], inputs: StepInputs, verified: Verified
    ) -> tuple[torch.Tensor | None, ...]:
        """Of the `parts` of a pass what each sequence keeps: [positions, width].

        None for one of which nothing is of use. They are parts of these where the rows lie side by side.
        """
        if self.feature_layers:
            rows = verified_rows(inputs, verified)
            return tuple(part[own] for part, own in zip(parts, rows, strict=True))
        (hidden,) = parts
        kept: list[torch.Tensor | None] = [None] * len(inputs.query_lens)
        last = last_rows(inputs, verified)
        sequences = np.searchsorted(np.cumsum(inputs.query_lens), inputs.logits_rows[last], side="right")
        for sequence, row in zip(sequences.tolist(), last.tolist(), strict=True):
            kept[sequence] = hidden[row : row + 1]
        return tuple(kept)


class ModelRunner:
    """Owns the model's paged K/V tensors and what is swapped out of them into `num_host_blocks`.

    Every method runs on the one thread that made it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        sampler: Sampler,
        num_host_blocks: int = 0,
        for_drafts: ForDrafts = ForDrafts(),
    ) -> None:
        self.forward = PackedForward(loaded, for_drafts.feature_layers)
        self._sampler = sampler
        self.scorer = PromptScorer(loaded)
        self._verifier = make_verifier(for_drafts.verification, sampler)
        self.for_drafts = for_drafts
        self.kv = self.forward.make_kv(num_blocks, block_size, loaded.kv_dtype)
        self.memory = KvMemory(self.forward, self.kv)
        self.swap = SwapTensors(self.kv, num_host_blocks)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepResult:
        """One step: move blocks, write K/V, attend, draw, judge drafts. Seconds are by the device's clock.

        A row that cannot be drawn is in the result's `row_errors`. Raises OutOfDeviceMemory; other errors of
        the forward pass come through.
        """
        device = self.kv.device
        with failures_named():
            self.reserve(inputs.moves)
            start = mark(device)
            num_bytes = self.move(inputs.moves)
            begin = mark(device) if num_bytes else start
            hidden = None
            with self.scorer.watching(inputs.prompt_rows) as seen:
                if self.for_drafts.keeps_features:
                    logits, hidden = self.forward.with_features(inputs, self.kv)
                else:
                    logits = self.forward(inputs, self.kv)
            middle = mark(device)
            verified = self.judge(logits, inputs)
            parts = None if hidden is None else self.for_drafts.parts(hidden, inputs)
            scores = self.scorer.score(inputs.prompt_rows, seen)
        end = mark(device)
        return StepResult(
            verified.rows,
            seconds_between(begin, middle),
            seconds_between(middle, end),
            seconds_between(start, begin) if num_bytes else 0.0,
            num_bytes,
            None if parts is None else self.for_drafts.features(parts, inputs, verified),
            scores,
        )

    def judge(self, logits: torch.Tensor, inputs: StepInputs) -> Verified:
        """Draw from the `logits` [R, vocab] and judge the drafts; those accepted of a tree are moved."""
        if not len(logits):
            return Verified(SampledRows([]))
        verified = draw_isolated(self._verifier, logits, inputs.sampling, inputs.drafts)
        if inputs.drafts is not None:
            self.kv.move_rows(*accepted_moves(inputs, verified.rows.token_ids))
        return verified

    def reserve(self, moves: BlockMoves) -> None:
        """Take the host memory that `move` will copy to: its time is no part of the swap rate."""
        self.swap.reserve(copy.target for copy in moves.swap_out)

    def move(self, moves: BlockMoves) -> int:
        """In this order: save what is to be kept, clean, copy, bring back what was saved.

        How many bytes went to the host or came from there.
        """
        self.swap.copy_out(moves.swap_out)
        self.kv.scrub_blocks(moves.scrub_blocks)
        self.kv.copy_blocks(moves.block_copies)
        self.swap.copy_in(moves.swap_in)
        return (len(moves.swap_out) + len(moves.swap_in)) * self.kv.block_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small prefill and decodes over K/V not in use yet, so that the first request is not slow."""
        block_size = self.kv.block_size
        length = min(_WARM_UP_TOKENS, self.forward.loaded.max_model_len)
        num_blocks = -(-length // block_size)
        kv = self.kv
        if kv.num_blocks < num_blocks * _WARM_UP_SEQUENCES:
            kv = self.forward.make_kv(num_blocks * _WARM_UP_SEQUENCES, block_size, kv.dtype)
        tokens = [0] * length
        parts = [
            Part(tokens, length - 1, length, range(row * num_blocks, (row + 1) * num_blocks))
            for row in range(_WARM_UP_SEQUENCES)
        ]
        steps = [[parts[0]._replace(first=0)], parts, parts[:1]]
        drawn: Iterable[tuple[list[Part], float]] = zip(steps, (0.0, 1.0, 0.0), strict=True)
        if kv.device.type == "cuda":  # where drafts, and a context that many read, have kernels of their own
            longest = min(length * _WARM_UP_SEQUENCES, self.forward.loaded.max_model_len)
            every_block = range(num_blocks * _WARM_UP_SEQUENCES)
            steps.append([parts[0]._replace(first=max(0, length - _WARM_UP_VERIFIED))])
            steps.append([Part([0] * longest, longest - 1, longest, every_block)])
            drawn = product(steps, (0.0, 1.0))  # kernels are compiled for each size
        for step, temperature in drawn:
            inputs = pack_step(step, block_size, temperature=temperature)
            self._sampler.sample(self.forward(inputs, kv), inputs.sampling)


def last_rows(inputs: StepInputs, verified: Verified) -> Int64:
    """The row of logits that each sampled sequence's last token was drawn from. [sampled sequences]"""
    rows = np.arange(len(inputs.logits_rows))
    if inputs.drafts is None or verified.paths is None:
        return rows
    is_draft = np.zeros(len(rows), np.bool_)
    for first, count in zip(inputs.drafts.first_row, inputs.drafts.num_drafts, strict=True):
        is_draft[first + 1 : first + 1 + count] = True
    rows = rows[~is_draft]
    rows[np.searchsorted(rows, inputs.drafts.first_row)] = verified.paths.last_row
    return rows


def verified_rows(inputs: StepInputs, verified: Verified) -> list[slice | list[int]]:
    """The tokens that each sequence keeps of its own, in order: the known ones and accepted drafts. [S]"""
    rows: list[slice | list[int]] = [slice(None)] * len(inputs.query_lens)
    drafts, paths = inputs.drafts, verified.paths
    if drafts is not None and paths is not None:
        first = 0
        counts = zip(drafts.num_drafts.tolist(), paths.num_accepted.tolist(), strict=True)
        for sequence, (count, num_accepted) in zip(drafts.sequence.tolist(), counts, strict=True):
            known = int(inputs.query_lens[sequence]) - count
            rows[sequence] = slice(known + num_accepted)
            if paths.drafts is not None:
                own = paths.drafts[first : first + num_accepted].tolist()
                first += num_accepted
                if own != list(range(num_accepted)):
                    rows[sequence] = [*range(known), *(known + draft for draft in own)]
    return rows


def rows_apart(hidden: torch.Tensor, query_lens: Int32, window: int) -> list[torch.Tensor]:
    """Copies of each sequence's rows of `hidden` [N, width]: of a long one the last `window` or a few more.

    Each has memory of its own: one that is held for hundreds of steps would keep what passed beside it.
    """
    parts: list[torch.Tensor] = []
    most = max(window, _SHORT)
    lens = query_lens.tolist()
    spans = zip(accumulate(lens), lens, strict=True)
    for is_long, group in groupby(spans, key=lambda span: span[1] > _SHORT):
        stops, counts = zip(*group, strict=True)
        if is_long:
            pairs = zip(stops, counts, strict=True)
            parts += [hidden[stop - min(count, most) : stop].clone() for stop, count in pairs]
        else:
            rows = hidden[stops[0] - counts[0] : stops[-1]]
            own = [rows.new_empty((count, *rows.shape[1:])) for count in counts]
            torch.split_with_sizes_copy(rows, counts, out=own)  # on CUDA one launch for all
            parts += own
    return parts
