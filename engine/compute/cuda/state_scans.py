"""TritonScans: the states of recurrent layers, advanced by `state_kernels` on a CUDA device."""

from __future__ import annotations

import torch
import triton

from engine.compute.cuda.state_kernels import delta_kernel, selective_kernel, structured_kernel
from engine.compute.recurrent.state_kernel import DeltaInputs, SelectiveInputs, StructuredInputs

# Of a program: the numbers of a state that its threads keep in registers, and the most in one column of them.
_HELD = 4096
_MOST_SIZE = 256


class TritonScans:
    """A StateKernel, one launch a scan. Every tensor is float32; rows that no run has become 0."""

    def delta(self, inputs: DeltaInputs, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor | None:
        """See StateKernel."""
        (_, key_heads, keys), (_, heads, values) = inputs.key.shape, inputs.value.shape
        if keys > _MOST_SIZE or not state.is_contiguous():
            return None
        output = torch.zeros_like(inputs.value, memory_format=torch.contiguous_format)
        padded = triton.next_power_of_2(keys)
        columns = part_of(values, padded)
        delta_kernel[(runs.shape[1], heads * triton.cdiv(values, columns))](
            *(each.contiguous() for each in inputs),
            output,
            state,
            runs,
            runs.shape[1],
            HEADS=heads,
            SHARE=heads // key_heads,
            KEYS=keys,
            VALUES=values,
            BY_CHANNEL=inputs.logs.shape[-1] > 1,
            KEYS_PADDED=padded,
            COLUMNS=columns,
        )
        return output

    def structured(
        self, inputs: StructuredInputs, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        (_, heads, dim), (_, groups, size) = inputs.inputs.shape, inputs.b.shape
        if size > _MOST_SIZE or not state.is_contiguous():
            return None
        output = torch.zeros_like(inputs.inputs, memory_format=torch.contiguous_format)
        padded = triton.next_power_of_2(size)
        rows = part_of(dim, padded)
        structured_kernel[(runs.shape[1], heads * triton.cdiv(dim, rows))](
            *(each.contiguous() for each in inputs),
            output,
            state,
            runs,
            runs.shape[1],
            HEADS=heads,
            SHARE=heads // groups,
            DIM=dim,
            SIZE=size,
            ROWS=rows,
            SIZE_PADDED=padded,
        )
        return output

    def selective(
        self, inputs: SelectiveInputs, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        channels, size = inputs.rates.shape
        if size > _MOST_SIZE or not state[0].is_contiguous():
            return None
        output = torch.zeros_like(inputs.inputs, memory_format=torch.contiguous_format)
        padded = triton.next_power_of_2(size)
        rows = part_of(channels, padded)
        selective_kernel[(runs.shape[1], triton.cdiv(channels, rows))](
            *(each.contiguous() for each in inputs),
            output,
            state,
            runs,
            runs.shape[1],
            state.stride(0),
            CHANNELS=channels,
            SIZE=size,
            ROWS=rows,
            SIZE_PADDED=padded,
        )
        return output


def part_of(most: int, size: int) -> int:
    """How many of `most` lines of a state, each of `size` numbers, one program keeps."""
    return int(min(triton.next_power_of_2(most), max(1, _HELD // size)))
