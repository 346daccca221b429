"""A device whose steps last a stated time and compute nothing, for the host that launches them.

The host does what it does for a GPU (see CudaRunner): it launches steps ahead and fills their tables, of
which nothing is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from engine.compute.attention import LayerCall, StepAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_draw import DeviceDraws, DrawColumns
from engine.compute.cuda.device_tokens import DeviceTokens
from engine.compute.cuda.graphs.device_pass import AnyForward
from engine.compute.cuda.graphs.launched import Launched
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_work import Workforce
from engine.compute.drafters.draft_chain import ChainRest
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.following_steps import FollowingSteps, UnreadRows
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.processors import Filters
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Draws, commit_rows
from engine.plan.step_records import (
    Int64,
    SampledRows,
    SamplingInputs,
    StepInputs,
    StepResult,
    UnreadDrafts,
)
from tests.support.recorded import TabledReference, TabledStep

T = TypeVar("T")
NUM_PROCESSORS = 132  # an H200's: what work is divided among


class StepTimes(NamedTuple):
    """What steps of a model last: reading its weights or multiplying by them, and reading K/V."""

    step_s: float
    sequence_s: float
    token_s: float = 0.0

    def of(self, inputs: StepInputs) -> float:
        """Seconds of this step."""
        return self.of_tokens(len(inputs.token_ids), len(inputs.query_lens))

    def of_tokens(self, num_tokens: int, num_sequences: int) -> float:
        """Seconds of a step of so many."""
        return max(self.step_s, self.token_s * num_tokens) + self.sequence_s * num_sequences


class StatedDevice:
    """Does one thing at a time, in the order in which it is asked. On any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ends_at = 0.0

    def take(self, seconds: float) -> tuple[float, float]:
        """Work for so long when all else is done; from when to when."""
        with self._lock:
            begins_at = max(self._ends_at, time.perf_counter())
            self._ends_at = begins_at + seconds
            return begins_at, self._ends_at


class StatedRunner:
    """An AheadRunner around a CudaRunner on the CPU, over the parts of `plain`.

    Each token is the likeliest of the same logits; with `successors`, the one that follows the token before.
    With `shares_device` False no other runner is told of what is drawn here before the host has read it.
    """

    def __init__(
        self,
        plain: ModelRunner | RecurrentRunner,
        max_tokens: int,
        limits: GraphLimits,
        times: StepTimes,
        device: StatedDevice,
        successors: Int64 | None = None,
        *,
        shares_device: bool = True,
    ) -> None:
        self._shares_device = shares_device
        plain.forward.backend = _OfAnyNumbers()
        self._forward = _Forward(plain.forward)
        plain.forward = cast(PackedForward, self._forward)
        self._runner = runner = CudaRunner(plain, max_tokens, limits, _DoesNothing(), _GREEDY)
        self._times = times
        self._device = device
        self._successors = successors
        self._drawn: Int64 | None = None  # [R] of the last launch
        self._begins_at = self._free_at = self._ends_at = 0.0  # the last step
        self._step_s = 0.0  # of those that are being queued
        self._num_begun = 0  # of them
        self.kv, self.parts = runner.kv, runner.parts
        self.pass_modules = runner.pass_modules
        runner.graphs.module.register_forward_hook(self._begin)

    def warm_up(self) -> None:
        """See CudaRunner."""
        self._runner.warm_up()
        self._forward.is_warm = True

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> StatedStep:
        """See AheadRunner."""
        step = self._begun(self._times.of(inputs), 1, lambda: self._runner.launch(inputs))
        begins_at = self._begins_at
        if inputs.drafts is not None and inputs.drafts.unread is not None:  # it comes behind them
            inputs = inputs.with_read_drafts(_tokens(inputs.drafts.unread).read())  # which are stated
            begins_at = self._free_at
        if self._successors is not None:
            self._drawn = self._followers(inputs, self._successors)
        return StatedStep(step, inputs, begins_at, self._ends_at, self._drawn)

    def follow(self, steps: FollowingSteps) -> StatedChain:
        """See CudaRunner."""
        seconds = self._times.of_tokens(steps.num_rows, steps.num_rows)
        rest = self._begun(seconds, len(steps), lambda: self._runner.follow(steps))
        unread, drawn = rest.unread if self._shares_device else None, None
        if self._successors is not None:
            assert self._drawn is not None, "a step that goes on has one before it"
            token_ids, rows = self._drawn[steps.previous_rows], []
            for _ in range(len(steps)):
                token_ids = self._successors[token_ids]
                rows.append(token_ids)
            drawn = np.stack(rows)
            if unread is not None:
                _put(unread, unread.places[:, 0], self._drawn)
                _put(unread, unread.places[steps.previous_rows, 1:], drawn.T)
            self._drawn = token_ids
        return StatedChain(rest, self._ends_at, drawn, unread)

    def keep(self) -> UnreadRows | None:
        """See CudaRunner."""
        unread = self._runner.keep() if self._shares_device else None
        if unread is not None and self._drawn is not None:
            _put(unread, unread.places[:, 0], self._drawn)
        return unread

    def _begun(self, seconds: float, num_steps: int, queue: Callable[[], T]) -> T:
        """Have the device work so long on each step: from its replay on, or if none, when all is queued."""
        self._step_s, self._num_begun = seconds, 0
        queued = queue()
        for _ in range(num_steps - self._num_begun):
            self._begin()
        return queued

    def _begin(self, *_: object) -> None:
        self._num_begun += 1
        self._begins_at = max(self._ends_at, time.perf_counter())
        self._free_at, self._ends_at = self._device.take(self._step_s)

    def _followers(self, inputs: StepInputs, successors: Int64) -> Int64:
        """What each row draws, [R]."""
        token_ids, previous = inputs.token_ids, inputs.previous_rows
        if previous is not None:
            assert self._drawn is not None, "a step that goes on has one before it"
            token_ids = np.where(previous < 0, token_ids, self._drawn[previous])
        return successors[token_ids[inputs.logits_rows]]


class StatedStep:
    """A LaunchedStep that is over when its time has come."""

    def __init__(
        self, step: Launched, inputs: StepInputs, begin: float, ends_at: float, drawn: Int64 | None
    ) -> None:
        self._step = step
        self._inputs = inputs
        self._begin = begin
        self._ends_at = ends_at
        self._drawn = drawn

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        self._step.draw(sampling)

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        result = replace(self._step.wait(), forward_s=self._ends_at - self._begin, sample_s=0.0)
        return result if self._drawn is None else replace(result, rows=self._judged(self._drawn))

    def _judged(self, drawn: Int64) -> SampledRows:
        """The rows with these tokens; drafts are held against them."""
        if self._inputs.drafts is None:
            return SampledRows(drawn.tolist())
        drafts = DraftRows.of(self._inputs.drafts)
        draws = Draws(drawn, {}, frozenset(), None)
        return commit_rows(None, self._inputs.sampling, drafts, draws, drafts.follow(drawn)).rows


class StatedChain:
    """Steps of a chain, which are over when their time has come."""

    def __init__(
        self, rest: ChainRest, ends_at: float, drawn: Int64 | None, unread: UnreadRows | None
    ) -> None:
        self.unread = unread
        self._rest = rest
        self._ends_at = ends_at
        self._drawn = drawn

    def wait(self) -> Int64:
        """See ChainRest."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        token_ids = self._rest.wait()
        return token_ids if self._drawn is None else self._drawn


def _put(unread: UnreadRows, places: Int64, token_ids: Int64) -> None:
    """Have these be the tokens that another runner computes."""
    _tokens(unread).tokens.numpy()[places] = token_ids


def _tokens(unread: UnreadRows | UnreadDrafts) -> DeviceTokens:
    assert isinstance(unread.tokens, DeviceTokens)
    return unread.tokens


class _Forward:
    """The forward pass of another, which computes nothing once it `is_warm`: for steps of no recording."""

    def __init__(self, inner: AnyForward) -> None:
        self._inner = inner
        self._logits: torch.Tensor | None = None  # [1, vocab]
        self.is_warm = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any) -> Any:
        return self._inner(*args)

    def compute(self, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        """See PackedForward; the logits of one token stand for all."""
        if not self.is_warm or self._logits is None:
            logits = self._inner.compute(token_ids, *args)
            self._logits = logits[:1].clone()
            return logits
        rows = args[2] if len(args) > 2 and args[2] is not None else token_ids
        return self._logits.expand(len(rows), -1)


class _OfAnyNumbers(TabledReference):
    """Divides work as for a large GPU; what recordings attend to is nothing."""

    def workforce(self, kv: KvTensors) -> Workforce:
        return Workforce.of(NUM_PROCESSORS, kv.compute_dtype.itemsize)

    def step(self, tables: StepTables, kv: KvTensors) -> StepAttention:
        return _StepOfNothing(tables, kv)


class _StepOfNothing(TabledStep):
    """Has the tables laid out and reads nothing of them."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return super().attend(query, call).zero_()


class _DoesNothing:
    """A Recorder whose recordings take no time: what the work did once is what it leaves each time."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


def _greedy(logits: torch.Tensor, _: DrawColumns) -> torch.Tensor:
    return logits.argmax(dim=1)


def _greedy_at(logits: torch.Tensor, places: torch.Tensor, _: Filters, __: torch.Tensor) -> torch.Tensor:
    return logits.index_select(0, places).argmax(dim=1)


_GREEDY = DeviceDraws(_greedy, _greedy_at)  # a device takes no longer for others
