"""CudaRunner: runs steps on a GPU without waiting for it; what the host need not know stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.compute.attention.tree_mask import accepted_moves
from engine.compute.cuda.device_draw import TORCH_DRAWS, DeviceDraws, DrawColumns, column_words
from engine.compute.cuda.device_ints import send
from engine.compute.cuda.device_tokens import DeviceTokens
from engine.compute.cuda.graphs.device_pass import DevicePass, EagerPasses, TokenMemory
from engine.compute.cuda.graphs.launched import (
    DrawnTokens,
    Launched,
    LaunchedApart,
    LaunchedChain,
    PassMarks,
    QueuedDraw,
)
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.graphs.step_graphs import GraphLimits, StepGraphs
from engine.compute.cuda.step_chain import StepChain
from engine.compute.cuda.step_draw import StepDraw, can_draw, to_host
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.device import failures_named, mark, wait_for
from engine.compute.runner.dummy_steps import plain_sampling
from engine.compute.runner.following_steps import FollowingSteps, UnreadRows
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Verified
from engine.plan.step_records import (
    DraftInputs,
    Int64,
    LogitAdjustment,
    SamplingInputs,
    StepInputs,
    StepResult,
    TokenCounts,
)

_LEAST_PLACES = 4096  # steps that only measure or warm up may be larger than those served
_UNREAD_PLACES = 16  # of drafts that the host has not read, a sequence; of more it waits for them
# A row that is filtered, and one that asks for all that makes a draw take longer: to warm up with.
_FILTERED = replace(plain_sampling(np.ones(1), temperature=1.0), top_p=np.full(1, 0.5, np.float32))
_ALL_AT_ONCE = replace(
    _FILTERED,
    num_logprobs=np.ones(1, np.int32),
    adjustments=(
        LogitAdjustment(
            row=0,
            logit_bias=((0, 1.0),),
            allowed_token_ids=(0, 1),
            banned_token_ids=(1,),
            repetition_penalty=1.5,
            presence_penalty=0.5,
            history=TokenCounts(np.zeros(1, np.int64), np.ones(1, np.int64)),
        ),
    ),
)


class CudaRunner:
    """An AheadRunner over the tensors and the parts of `runner`, which it has for itself.

    A step's inputs go to the device in one copy and its tokens come back in one; adjusted logits and
    log-probabilities take a few more. Of drafts that are judged by chance the launch waits for the device and
    does what ModelRunner does. Steps are of up to `max_rows` rows. Where a launch or a draw raises, the
    device is done with what was queued of it. Every method runs on the one thread that made it; a launched
    step may be waited for on any. One with trees of drafts is waited for before the next is launched: only
    then are the accepted ones at their positions.
    """

    def __init__(
        self,
        runner: ModelRunner | RecurrentRunner,
        max_rows: int,
        limits: GraphLimits,
        recorder: Recorder,
        draws: DeviceDraws = TORCH_DRAWS,
    ) -> None:
        self.parts = runner
        self._recorder = recorder
        self.kv = kv = runner.kv
        num_places = max(max_rows, _LEAST_PLACES, *(shape.num_tokens for shape in limits.shapes()))
        num_unread = _UNREAD_PLACES * limits.max_num_seqs
        self._drawn = torch.zeros(num_places + num_unread, dtype=torch.int64, device=kv.device)
        self._unread = self._drawn[num_places:]  # the drafts of the step that is being queued
        self._places = np.zeros(0, np.int64)  # of the last launch's rows in `_drawn`
        self._judges_by_match = runner.for_drafts.verification == "match"
        keeps_features = runner.for_drafts.keeps_features
        self._tokens = tokens = TokenMemory(self._drawn, draws.plain)
        self._draw = StepDraw(tokens, draws.filtered)
        self._eager = EagerPasses(runner.forward, runner.memory, tokens, keeps_features=keeps_features)
        self.graphs = StepGraphs(
            runner.forward, runner.memory, tokens, limits._replace(keeps_features=keeps_features)
        )
        self._chain = StepChain(self.graphs, tokens, draws.filtered)

    @property
    def pass_modules(self) -> tuple[torch.nn.Module, ...]:
        """Whose calls are passes, beside those of the model itself: for who hooks passes."""
        return (self.graphs.module,)

    def warm_up(self) -> None:
        """Have everything compiled and recorded that serving needs, so that no request is slow for it."""
        self.parts.warm_up()
        self._warm_up_draw()
        self.graphs.record(self._recorder)

    @torch.inference_mode()
    def _warm_up_draw(self) -> None:
        """Have the draw compiled for logits as the model's mostly are, and as adjusted ones are.

        What else a row may ask for is done once, so that its kernels are there.
        """
        loaded, places = self.parts.forward.loaded, np.zeros(1, np.int64)
        logits = torch.zeros((1, loaded.vocab_size), dtype=loaded.dtype, device=self.kv.device)
        columns = DrawColumns.of(send(column_words(plain_sampling(np.zeros(1)), places, 1), self.kv.device))
        under_way = DevicePass(logits, places, partial(self._tokens.draw, logits, columns))
        for sampling in (_FILTERED, _ALL_AT_ONCE):
            self._draw.queue(under_way, sampling)

    def run(self, inputs: StepInputs) -> StepResult:
        """See ModelRunner.run."""
        return self.launch(inputs).wait()

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Launched:
        """Queue a step: move blocks, write K/V, attend, draw. See AheadRunner, and ModelRunner.run."""
        runner, device = self.parts, self.kv.device
        with self._done_where_it_fails(), failures_named():
            runner.reserve(inputs.moves)
            inputs = self._behind_drafts(inputs)
            start = mark(device)
            num_bytes = runner.move(inputs.moves)
            begin = mark(device) if num_bytes else start
            with runner.scorer.watching(inputs.prompt_rows) as seen:
                under_way = self._pass(inputs)
            runner.memory.commit(inputs)
        marks = PassMarks(start, begin, mark(device))
        draw = partial(self._queue_draw, _Pass(inputs, under_way, seen))
        launched = Launched(marks, draw, num_bytes)
        if not inputs.is_drawn_later:
            launched.draw(inputs.sampling)
        return launched

    @torch.inference_mode()
    def follow(self, steps: FollowingSteps) -> LaunchedChain | LaunchedApart:
        """Queue steps behind the one that was launched last, whose tokens the first of them computes.

        `rejection` and `block` are not for them: nothing of them is verified.
        """
        num_drawn = len(steps) * steps.num_rows
        with self._done_where_it_fails(), failures_named():
            kept = self._chain.queue(steps, self._places)
            host = None if kept is None else to_host(kept[-num_drawn:])
        if kept is None or host is None:
            apart = [self.launch(steps.step(number)) for number in range(len(steps))]
            return LaunchedApart(apart, steps.slots >= 0)
        end = mark(self.kv.device)
        unread = UnreadRows(DeviceTokens(end, kept), steps.places(self._places))
        self._places = np.arange(steps.num_rows)
        return LaunchedChain(end, host.view(len(steps), -1), unread)

    @torch.inference_mode()
    def keep(self) -> UnreadRows:
        """What the step that was launched last draws, where later ones do not draw over it."""
        kept = self._drawn[: int(self._places[-1]) + 1].clone()
        return UnreadRows(DeviceTokens(mark(self.kv.device), kept), self._places[:, None])

    @contextmanager
    def _done_where_it_fails(self) -> Iterator[None]:
        """Have the device be done with what was queued of a step before an error of it comes through.

        Its blocks are others' from then on, who may fill them in another stream, from the disk.
        """
        try:
            yield
        except Exception:
            with suppress(Exception):  # the error that is on its way says more
                wait_for(mark(self.kv.device))
            raise

    def _behind_drafts(self, inputs: StepInputs) -> StepInputs:
        """Have the step come behind the drafts that are not read yet; too many are read here."""
        drafts = inputs.drafts
        if drafts is None or (tokens := _unread_of(drafts)) is None:
            return inputs
        if len(tokens) <= len(self._unread):
            tokens.copy_to(self._unread)
            return inputs
        return inputs.with_read_drafts(tokens.read())

    def _pass(self, inputs: StepInputs) -> DevicePass:
        """The pass, recorded or not, over tokens that the last launch drew, or another runner drafted."""
        previous, rows = None, inputs.previous_rows
        if rows is not None:
            previous = np.full(len(rows), -1)
            previous[rows >= 0] = self._places[rows[rows >= 0]]
        drafts = inputs.drafts
        if drafts is not None and drafts.unread is not None:
            previous = np.full(len(inputs.token_ids), -1) if previous is None else previous
            is_unread = drafts.unread.places >= 0
            places = len(self._drawn) - len(self._unread) + drafts.unread.places[is_unread]
            previous[inputs.logits_rows[drafts.rows[is_unread]]] = places
        return self.graphs.start(inputs, previous) or self._eager.start(inputs, previous)

    @torch.inference_mode()
    def _queue_draw(self, step: _Pass, sampling: SamplingInputs) -> QueuedDraw:
        """Queue all that comes behind the pass, or wait and do it where the host has to know."""
        inputs, under_way, runner = step.inputs, step.under_way, self.parts
        begin = mark(self.kv.device)
        with self._done_where_it_fails(), failures_named():
            if self._can_wait(inputs.drafts, sampling):
                drawn = self._draw.queue(under_way, sampling)
                self._places = under_way.places
                judge = partial(_judged, drawn, sampling, self._read(inputs.drafts))
                verdict = partial(self._settle, inputs, judge)
            else:
                verdict = partial(_known, self._judge(under_way, replace(inputs, sampling=sampling)))
            features = partial(self._features, self._hidden(under_way, inputs), inputs)
            scores = runner.scorer.score(inputs.prompt_rows, step.seen)
        return QueuedDraw(begin, mark(self.kv.device), verdict, features, scores)

    def _can_wait(self, drafts: DraftInputs | None, sampling: SamplingInputs) -> bool:
        """Whether the host need not know now what is drawn: a draft is held against what its row draws."""
        return (drafts is None or self._judges_by_match) and can_draw(sampling)

    def _read(self, drafts: DraftInputs | None) -> Callable[[], DraftInputs | None]:
        """What gives the drafts as they are known once the device is past what is queued by now."""
        if drafts is None or (tokens := _unread_of(drafts)) is None:
            return lambda: drafts
        host = to_host(self._unread[: len(tokens)])
        return lambda: drafts.known(host.numpy())

    def _settle(self, inputs: StepInputs, verdict: Callable[[], Verified]) -> Verified:
        """The verdict, with the accepted drafts of trees moved to where those of chains are."""
        verified = verdict()
        if inputs.drafts is not None:
            self.kv.move_rows(*accepted_moves(inputs, verified.rows.token_ids))
        return verified

    def _judge(self, under_way: DevicePass, inputs: StepInputs) -> Verified:
        """Wait for the logits and have the step decided; the next one finds its tokens here all the same."""
        logits, places = under_way.logits, under_way.places
        if len(logits) != len(places):
            logits = logits.index_select(0, self._at(places))
        drafts = inputs.drafts
        if drafts is not None and (tokens := _unread_of(drafts)) is not None:
            inputs = replace(inputs, drafts=drafts.known(tokens.read()))
        verified = self.parts.judge(logits, inputs)
        self._places = np.arange(len(places))
        self._drawn[: len(places)].copy_(self._at(np.array(verified.rows.token_ids, np.int64)))
        return verified

    def _hidden(self, under_way: DevicePass, inputs: StepInputs) -> Sequence[torch.Tensor] | None:
        """Copies of what drafters read of the pass, verified or not; the next pass may write over it."""
        hidden, for_drafts = under_way.hidden, self.parts.for_drafts
        if hidden is None:
            return None
        if not for_drafts.feature_layers:
            hidden = hidden.index_select(0, self._at(under_way.places))
        return for_drafts.parts(hidden, inputs)

    def _features(
        self, hidden: Sequence[torch.Tensor] | None, inputs: StepInputs, verified: Verified
    ) -> tuple[torch.Tensor | None, ...] | None:
        """What each sequence keeps of it, on the device. A drafter may read it in any stream at once."""
        if hidden is None:
            return None
        features = self.parts.for_drafts.features(hidden, inputs, verified)
        if inputs.drafts is not None and inputs.drafts.parents is not None:
            wait_for(mark(self.kv.device))  # of trees the rows may have to be gathered
        return features

    def _at(self, numbers: Int64) -> torch.Tensor:
        """The numbers on the device, int64 [n], sent without waiting."""
        return send({"numbers": numbers}, self.kv.device)["numbers"]


class _Pass(NamedTuple):
    """A pass that was queued, for its draw."""

    inputs: StepInputs
    under_way: DevicePass
    seen: list[Any]  # of it, what prompts are scored by


def _known(verified: Verified) -> Verified:
    return verified


def _judged(drawn: DrawnTokens, sampling: SamplingInputs, read: Callable[[], DraftInputs | None]) -> Verified:
    drafts = read()
    return drawn.verdict(sampling, None if drafts is None else DraftRows.of(drafts))


def _unread_of(drafts: DraftInputs) -> DeviceTokens | None:
    """Where the drafts lie that the host has not read; None if it has read all."""
    if drafts.unread is None:
        return None
    tokens = drafts.unread.tokens
    assert isinstance(tokens, DeviceTokens), (
        "only a drafter on this device tells of drafts before they are read"
    )
    return tokens
