"""TritonScans: the states of recurrent layers, advanced by `state_kernels` on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.compute.cuda.conv_kernels import convolve_kernel, keep_kernel
from engine.compute.cuda.state_kernels import (
    delta_kernel,
    gated_delta_kernel,
    gated_structured_kernel,
    selective_kernel,
    structured_kernel,
)
from engine.compute.recurrent.state_kernel import (
    ConvInputs,
    DeltaInputs,
    GatedDelta,
    GatedStructured,
    SelectiveInputs,
    StructuredInputs,
)

# Of a program: the numbers of a state that its threads keep in registers, and the most in one column of them.
_HELD = 4096
_MOST_SIZE = 256
# Of a convolution: how many rows (but for a single one) and columns a program computes, and the fewest runs
# that it looks through. Few sizes, since each is compiled.
_ROWS, _COLUMNS, _LEAST_RUNS = 8, 256, 16


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """What a convolution's kernels are compiled for. Rows of the pass are `stride` apart."""

    width: int
    channels: int
    taps: int
    before: int
    num_kept: int
    stride: int
    has_bias: bool
    activated: bool


class TritonScans:
    """A StateKernel: a scan is a launch, and one that clears its output: rows that no run has become 0.

    Of `delta`, `structured` and `selective` every tensor is float32.
    """

    def convolve(self, inputs: ConvInputs, runs: torch.Tensor, joins: torch.Tensor) -> torch.Tensor | None:
        """See StateKernel. Two launches: what is kept moves only once all has been read."""
        rows, kept, (channels, taps) = inputs.rows, inputs.kept, inputs.weight.shape
        if inputs.before + 1 < taps or rows.stride(1) != 1 or not kept.is_contiguous():
            return None
        width, num_runs = rows.shape[1], runs.shape[1]
        sizes = ConvSizes(
            width,
            channels,
            taps,
            inputs.before,
            kept.shape[1],
            rows.stride(0),
            has_bias=inputs.bias is not None,
            activated=inputs.activated,
        )
        output = rows.new_empty(inputs.num_mixed, width)
        at_once = 1 if inputs.num_mixed == 1 else _ROWS
        blocks = triton.cdiv(width, _COLUMNS)
        convolve_kernel[(triton.cdiv(inputs.num_mixed, at_once), blocks)](
            rows,
            kept,
            inputs.weight,
            inputs.weight if inputs.bias is None else inputs.bias,
            output,
            runs,
            joins,
            num_runs,
            inputs.num_mixed,
            SIZES=sizes,
            RUNS_PADDED=max(_LEAST_RUNS, triton.next_power_of_2(num_runs)),
            ROWS=at_once,
            COLUMNS=_COLUMNS,
        )
        keep_kernel[(num_runs, blocks)](rows, kept, runs, joins, num_runs, SIZES=sizes, COLUMNS=_COLUMNS)
        return output

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

    def gated_delta(self, inputs: GatedDelta, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor | None:
        """See StateKernel."""
        rows, (_, heads, keys, values) = inputs.rows, state.shape
        if keys > _MOST_SIZE or rows.stride(1) != 1 or not state.is_contiguous():
            return None
        output = rows.new_zeros(len(rows), heads, values)
        padded = triton.next_power_of_2(keys)
        columns = part_of(values, padded)
        gated_delta_kernel[(runs.shape[1], heads * triton.cdiv(values, columns))](
            rows,
            inputs.decays,
            inputs.bias,
            output,
            state,
            runs,
            runs.shape[1],
            STRIDE=rows.stride(0),
            HEADS=heads,
            SHARE=heads // inputs.key_heads,
            KEYS=keys,
            VALUES=values,
            SCALE=keys**-0.5,
            BETA=inputs.beta,
            KEYS_PADDED=padded,
            COLUMNS=columns,
        )
        return output

    def gated_structured(
        self, inputs: GatedStructured, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        rows, (_, heads, dim, size) = inputs.rows, state.shape
        if size > _MOST_SIZE or rows.stride(1) != 1 or not state.is_contiguous():
            return None
        output = torch.zeros(len(rows), heads, dim, device=rows.device)
        padded = triton.next_power_of_2(size)
        lines = part_of(dim, padded)
        gated_structured_kernel[(runs.shape[1], heads * triton.cdiv(dim, lines))](
            rows,
            inputs.decays,
            inputs.bias,
            inputs.direct,
            output,
            state,
            runs,
            runs.shape[1],
            *inputs.limits,
            STRIDE=rows.stride(0),
            HEADS=heads,
            SHARE=heads // inputs.groups,
            DIM=dim,
            SIZE=size,
            ROWS=lines,
            SIZE_PADDED=padded,
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
