"""A device whose steps last a stated time and compute nothing, for the host that launches them.

The host does what it does for a GPU (see CudaRunner): it launches steps ahead and fills their tables, of
which nothing is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from engine.compute.attention import LayerCall, StepAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_draw import DeviceDraws, DrawColumns
from engine.compute.cuda.graphs.device_pass import AnyForward
from engine.compute.cuda.graphs.launched import Launched
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_work import Workforce
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.processors import Filters
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Draws, commit_rows
from engine.plan.step_records import Int64, SampledRows, SamplingInputs, StepInputs, StepResult
from tests.support.recorded import TabledReference, TabledStep

NUM_PROCESSORS = 132  # an H200's: what work is divided among


class StepTimes(NamedTuple):
    """What steps of a model last: reading its weights or multiplying by them, and reading K/V."""

    step_s: float
    sequence_s: float
    token_s: float = 0.0

    def of(self, inputs: StepInputs) -> float:
        """Seconds of this step."""
        read_s = self.sequence_s * len(inputs.query_lens)
        return max(self.step_s, self.token_s * len(inputs.token_ids)) + read_s


class StatedDevice:
    """Does one thing at a time, in the order in which it is asked. On any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ends_at = 0.0

    def take(self, seconds: float) -> float:
        """Work for so long when all else is done; the time at which that is over."""
        with self._lock:
            self._ends_at = max(self._ends_at, time.perf_counter()) + seconds
            return self._ends_at


class StatedRunner:
    """An AheadRunner around a CudaRunner on the CPU, over the parts of `plain`.

    Each token is the likeliest of the same logits; with `successors`, the one that follows the token before.
    """

    def __init__(
        self,
        plain: ModelRunner | RecurrentRunner,
        max_tokens: int,
        limits: GraphLimits,
        times: StepTimes,
        device: StatedDevice,
        successors: Int64 | None = None,
    ) -> None:
        plain.forward.backend = _OfAnyNumbers()
        self._forward = _Forward(plain.forward)
        plain.forward = cast(PackedForward, self._forward)
        self._runner = runner = CudaRunner(plain, max_tokens, limits, _DoesNothing(), _GREEDY)
        self._times = times
        self._device = device
        self._successors = successors
        self._drawn: Int64 | None = None  # [R] of the last launch
        self._ends_at = 0.0  # the last step
        self.kv, self.parts = runner.kv, runner.parts
        self.pass_modules = runner.pass_modules

    def warm_up(self) -> None:
        """See CudaRunner."""
        self._runner.warm_up()
        self._forward.is_warm = True

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> StatedStep:
        """See AheadRunner."""
        step = self._runner.launch(inputs)
        begin = max(self._ends_at, time.perf_counter())
        self._ends_at = self._device.take(self._times.of(inputs))
        if self._successors is not None:
            self._drawn = self._followers(inputs, self._successors)
        return StatedStep(step, inputs, begin, self._ends_at, self._drawn)

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
