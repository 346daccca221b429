"""Runs the scheduler's steps on the device: scheduled tokens in, drawn tokens out."""

from __future__ import annotations

import time

import torch

from engine.errors import OutOfDeviceMemory
from engine.model.loader import LoadedModel
from engine.model.packed_forward import PackedForward
from engine.model.rehearsal import Part, pack_step
from engine.model.self_check import check_forward
from engine.model.swap_tensors import SwapTensors
from engine.outputs import SampledRows, StepInputs, StepResult
from engine.sampling.sampler import Sampler

_WARM_UP_TOKENS = 64
_WARM_UP_SEQUENCES = 8


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
    ) -> None:
        self._forward = PackedForward(loaded)
        self._sampler = sampler
        self.kv = self._forward.make_kv(num_blocks, block_size)
        self.swap = SwapTensors(self.kv, num_host_blocks)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepResult:
        """One step: move blocks, write K/V, attend, draw. The seconds are of the device's own clock.

        A row that cannot be drawn is in the result's `row_errors`. Raises OutOfDeviceMemory; other errors of
        the forward pass come through.
        """
        num_swapped = len(inputs.swap_out) + len(inputs.swap_in)
        try:
            self.swap.reserve(copy.target for copy in inputs.swap_out)  # once, so its time is nobody's rate
            start = self._mark()
            self._move_blocks(inputs)
            begin = self._mark() if num_swapped else start
            logits = self._forward(inputs, self.kv)
            middle = self._mark()
            rows = self._sampler.sample(logits, inputs.sampling) if len(logits) else SampledRows([])
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfDeviceMemory("The forward pass ran out of memory.") from error
        end = self._mark()
        return StepResult(
            rows,
            _seconds(begin, middle),
            _seconds(middle, end),
            _seconds(start, begin) if num_swapped else 0.0,
            num_swapped * self.kv.block_bytes,
        )

    def _move_blocks(self, inputs: StepInputs) -> None:
        """In this order: save what is to be kept, clean, copy, bring back what was saved."""
        self.swap.copy_out(inputs.swap_out)
        self.kv.scrub_blocks(inputs.scrub_blocks)
        self.kv.copy_blocks(inputs.block_copies)
        self.swap.copy_in(inputs.swap_in)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small prefill and small decodes on scratch tensors, so that the first request is not slow."""
        block_size = self.kv.block_size
        length = min(_WARM_UP_TOKENS, self._forward.loaded.max_model_len)
        num_blocks = -(-length // block_size)
        kv = self._forward.make_kv(num_blocks * _WARM_UP_SEQUENCES, block_size)
        tokens = [0] * length
        parts = [
            Part(tokens, length - 1, length, range(row * num_blocks, (row + 1) * num_blocks))
            for row in range(_WARM_UP_SEQUENCES)
        ]
        for step in ([parts[0]._replace(first=0)], parts, parts[:1]):
            for temperature in (0.0, 1.0):
                inputs = pack_step(step, block_size, temperature=temperature)
                self._sampler.sample(self._forward(inputs, kv), inputs.sampling)

    def self_check(self) -> None:
        """Raise UnsupportedModel unless packed, chunked computation gives the model's own logits."""
        check_forward(self._forward)

    def _mark(self) -> float | torch.cuda.Event:
        """Now, on the clock of the device."""
        if self._forward.loaded.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU's allocator has no exception type of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
