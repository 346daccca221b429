"""`slipstream serve` with a device whose steps last a stated time and compute nothing.

`python -m tests.bench.stated_server MILLISECONDS MICROSECONDS FLAGS...`: a step lasts so many milliseconds,
and so many microseconds more for each of its sequences. The host does what it does for a GPU (see
CudaRunner): it launches steps ahead and fills their tables, of which nothing is read. Each token is the
likeliest of the same logits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch

from engine.compute.attention import LayerCall, StepAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_draw import DeviceDraws, DrawColumns
from engine.compute.cuda.graphs.launched import Launched
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_work import Workforce
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.processors import Filters
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult
from engine.startup import build_runner
from engine.startup.build_runner import RunnerSizes
from server.commands.cli import main
from tests.support.recorded import TabledReference, TabledStep

NUM_PROCESSORS = 132  # an H200's: what work is divided among


class OfAnyNumbers(TabledReference):
    """Divides work as for a large GPU; what recordings attend to is nothing."""

    def workforce(self, kv: KvTensors) -> Workforce:
        return Workforce.of(NUM_PROCESSORS, kv.compute_dtype.itemsize)

    def step(self, tables: StepTables, kv: KvTensors) -> StepAttention:
        return StepOfNothing(tables, kv)


class StepOfNothing(TabledStep):
    """Has the tables laid out and reads nothing of them."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return super().attend(query, call).zero_()


class DoesNothing:
    """A Recorder whose recordings take no time: what the work did once is what it leaves each time."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


def _greedy(logits: torch.Tensor, _: DrawColumns) -> torch.Tensor:
    return logits.argmax(dim=1)


def _greedy_at(logits: torch.Tensor, places: torch.Tensor, _: Filters, __: torch.Tensor) -> torch.Tensor:
    return logits.index_select(0, places).argmax(dim=1)


GREEDY = DeviceDraws(_greedy, _greedy_at)  # a device takes no longer for others


class StatedStep:
    """A LaunchedStep that is over when its time has come."""

    def __init__(self, step: Launched, seconds: float, ends_at: float) -> None:
        self._step = step
        self._seconds = seconds
        self._ends_at = ends_at

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        self._step.draw(sampling)

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return replace(self._step.wait(), forward_s=self._seconds, sample_s=0.0)


class StatedRunner:
    """An AheadRunner around a CudaRunner on the CPU, over the parts of `plain`."""

    def __init__(
        self, plain: ModelRunner | RecurrentRunner, sizes: RunnerSizes, step_s: float, sequence_s: float
    ) -> None:
        plain.forward.backend = OfAnyNumbers()
        max_blocks = -(-plain.forward.loaded.max_model_len // sizes.block_size)
        limits = GraphLimits(sizes.max_num_seqs, max_blocks, sizes.max_draft_tokens)
        self._runner = runner = CudaRunner(plain, sizes.max_num_tokens, limits, DoesNothing(), GREEDY)
        self._step_s = step_s
        self._sequence_s = sequence_s
        self._ends_at = 0.0  # the last step
        self.kv, self.parts = runner.kv, runner.parts
        self.pass_modules = runner.pass_modules

    def warm_up(self) -> None:
        """See CudaRunner."""
        self._runner.warm_up()

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> StatedStep:
        """See AheadRunner."""
        step = self._runner.launch(inputs)
        seconds = self._step_s + self._sequence_s * len(inputs.query_lens)
        self._ends_at = max(self._ends_at, time.perf_counter()) + seconds
        return StatedStep(step, seconds, self._ends_at)


def serve(milliseconds: str, microseconds: str, *flags: str) -> int:
    """The command."""

    def make_runner(
        loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts
    ) -> StatedRunner:
        plain = build_runner.make_runner(loaded, sampler, sizes, for_drafts)
        assert not isinstance(plain, CudaRunner)
        return StatedRunner(plain, sizes, float(milliseconds) / 1e3, float(microseconds) / 1e6)

    with patch("engine.startup.build.make_runner", make_runner):
        return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
