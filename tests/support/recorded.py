"""Recording without a GPU: attention that reads a step's tables on a CPU, a recorder that plays back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.compute.attention import LayerCall, ReferenceAttention, StepAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_work import HeadShape, Workforce
from engine.compute.runner.dummy_steps import plain_sampling
from engine.plan.step_records import Int32, StepInputs
from tests.support.device_waits import WaitingRefused

P = ParamSpec("P")
R = TypeVar("R")


def beside_the_device(method: Callable[P, R]) -> Callable[P, R]:
    """For what stands in for a kernel: it may look at its tensors, whatever is refused around it."""

    @wraps(method)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return plain


class TabledReference:
    """A TabledAttention whose steps are the reference's, over what their tables hold when they attend.

    Padding gets NaN: what comes of it must not matter.
    """

    def workforce(self, kv: KvTensors) -> Workforce:
        return Workforce.of(4, kv.compute_dtype.itemsize)

    def plan(self, inputs: StepInputs, kv: KvTensors) -> StepAttention:
        return ReferenceAttention().plan(inputs, kv)

    def step(self, tables: StepTables, kv: KvTensors) -> StepAttention:
        return TabledStep(tables, kv)


class TabledStep:
    """Chains only."""

    def __init__(self, tables: StepTables, kv: KvTensors) -> None:
        self._tables = tables
        self._kv = kv

    @beside_the_device
    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self._tables.arrays["slots"].long()
        real = slots >= 0
        if real.any():
            rows = self._kv.rows_of(slots[real], key.shape[1])
            self._kv.write(layer, rows, key[real], value[real])

    @beside_the_device
    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        layer = self._kv.layers[call.layer]
        self._tables.work(HeadShape(query.shape[1], layer.num_kv_heads, call.reach))  # is reserved
        output = query.new_full((*query.shape[:2], layer.value_dim), torch.nan)
        inputs = self._inputs()
        if inputs is not None:
            count = len(inputs.token_ids)
            output[:count] = self.plan(inputs).attend(query[:count], call)
        return output

    def plan(self, inputs: StepInputs) -> StepAttention:
        return ReferenceAttention().plan(inputs, self._kv)

    def _inputs(self) -> StepInputs | None:
        """The step as the tables tell it."""
        kv_lens = self._array("kv_lens")
        kv_lens = kv_lens[kv_lens >= 0]
        if not len(kv_lens):
            return None
        starts = self._array("query_starts")[: len(kv_lens) + 1]
        num_blocks = -(-kv_lens // self._kv.block_size)
        tables = np.zeros((len(kv_lens), num_blocks.max()), np.int32)
        for row, first in enumerate(self._array("table_starts")[: len(kv_lens)]):
            tables[row, : num_blocks[row]] = self._array("block_tables")[first : first + num_blocks[row]]
        count = int(starts[-1])
        return StepInputs(
            token_ids=np.zeros(count, np.int64),
            positions=self._array("positions")[:count].astype(np.int64),
            slot_mapping=self._array("slots")[:count].astype(np.int64),
            query_lens=np.diff(starts).astype(np.int32),
            kv_lens=kv_lens,
            block_tables=tables,
            logits_rows=np.zeros(0, np.int64),
            sampling=plain_sampling(np.zeros(0, np.int64)),
        )

    def _array(self, name: str) -> Int32:
        numbers: Int32 = self._tables.arrays[name].numpy()
        return numbers


class Playback:
    """A Recorder that carries the work out anew each time; `failures` are raised in turn, None being none.

    As on a device, what the host would wait for cannot be recorded.
    """

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.num_recorded = self.num_replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        with WaitingRefused():  # type: ignore[no-untyped-call]
            work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def with_sampling(inputs: StepInputs, **columns: Any) -> StepInputs:
    """The same step with other parameters for its rows."""
    return replace(inputs, sampling=replace(inputs.sampling, **columns))
