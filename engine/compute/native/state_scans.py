"""NativeScans: the states of recurrent layers, advanced by state_scans.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.compute.native.kernels import NativeKernels
from engine.compute.native.records import DeltaScan, Runs, SelectiveScan, StructuredScan
from engine.compute.recurrent.state_kernel import (
    ConvInputs,
    DeltaInputs,
    GatedDelta,
    GatedStructured,
    SelectiveInputs,
    StructuredInputs,
)

# As state_scans.h has them: of a head by the delta rule; of the numbers that an input has in other states.
_MOST_KEYS, _KEYS_AT_ONCE, _COLUMNS = 256, 4, 32
_MOST_SIZE, _LANES = 256, 16


class NativeScans:
    """A StateKernel with the threads of `kernels`. It computes in float32, and so are its results."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._team = kernels.team
        self._delta = kernels.function("slip_delta_scan", ctypes.POINTER(DeltaScan))
        self._structured = kernels.function("slip_structured_scan", ctypes.POINTER(StructuredScan))
        self._selective = kernels.function("slip_selective_scan", ctypes.POINTER(SelectiveScan))

    def convolve(self, inputs: ConvInputs, runs: torch.Tensor, joins: torch.Tensor) -> None:
        """See StateKernel: torch's operations do it."""

    def delta(self, inputs: DeltaInputs, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor | None:
        """See StateKernel."""
        (_, key_heads, keys), (_, heads, values) = inputs.key.shape, inputs.value.shape
        if keys > _MOST_KEYS or keys % _KEYS_AT_ONCE or values % _COLUMNS or not state.is_contiguous():
            return None
        decays = inputs.logs.exp()
        output = torch.empty(inputs.value.shape)
        given = _contiguous(inputs.query, inputs.key, inputs.value, decays, inputs.beta)
        sizes = heads, key_heads, keys, values, decays.shape[-1] == keys > 1
        self._delta(self._team.handle, DeltaScan(_record(runs), *_addresses(*given, state, output), *sizes))
        return output

    def gated_delta(self, inputs: GatedDelta, state: torch.Tensor, runs: torch.Tensor) -> None:
        """See StateKernel: torch's operations do what is around the scan."""

    def gated_structured(self, inputs: GatedStructured, state: torch.Tensor, runs: torch.Tensor) -> None:
        """See StateKernel: torch's operations do what is around the scan."""

    def structured(
        self, inputs: StructuredInputs, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        (_, heads, dim), (_, groups, size) = inputs.inputs.shape, inputs.b.shape
        if size > _MOST_SIZE or size % _LANES or not state.is_contiguous():
            return None
        output = torch.empty(inputs.inputs.shape)
        given = _contiguous(inputs.inputs, inputs.logs.exp(), inputs.b, inputs.c)
        record = StructuredScan(_record(runs), *_addresses(*given, state, output), heads, groups, dim, size)
        self._structured(self._team.handle, record)
        return output

    def selective(
        self, inputs: SelectiveInputs, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        channels, size = inputs.rates.shape
        if size > _MOST_SIZE or size % _LANES or not state[:1].is_contiguous():
            return None
        output = torch.empty_like(inputs.inputs, memory_format=torch.contiguous_format)
        given = _contiguous(*inputs)
        sizes = channels, size, state.stride(0)  # of one of Zamba's heads slots lie apart
        record = SelectiveScan(_record(runs), *_addresses(*given, state, output), *sizes)
        self._selective(self._team.handle, record)
        return output


def _contiguous(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same numbers in float32, to be kept for as long as their addresses are."""
    return [tensor.float().contiguous() for tensor in tensors]


def _addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _record(runs: torch.Tensor) -> Runs:
    """Of `runs` int64 [4, S], which SlotStep keeps."""
    return Runs(*_addresses(*runs), runs.shape[1])
