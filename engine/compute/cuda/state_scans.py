"""TritonScans: the states of recurrent layers, advanced by `state_kernels` on a CUDA device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.compute.cuda.conv_kernels import convolve_kernel, keep_kernel
from engine.compute.cuda.state_chunks import (
    delta_chunks_kernel,
    gated_delta_chunks_kernel,
    gated_structured_chunks_kernel,
    structured_chunks_kernel,
)
from engine.compute.cuda.state_kernels import (
    NO_CHUNKS,
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
# Of chunks: tokens; how many sequences are at work at once; and how many runs are looked through for those.
CHUNK, _AT_ONCE, _FEW_RUNS, _MANY_RUNS = 16, 8, 64, 1024
# Warps of a program that takes in chunks; by channel, four would keep much of one outside their registers.
_WARPS, WARPS_BY_CHANNEL = 4, 8
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


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The state of a head, `lines` of `size` numbers each, as programs share it; by the names of kernels."""

    num_heads: int
    lines: int
    size: int
    lines_name: str
    size_name: str

    def sizes(self, least: int = 1) -> dict[str, int]:
        """How many lines a program has, and up to where a line is padded; both `least` or more."""
        padded = max(least, triton.next_power_of_2(self.size))
        return {self.lines_name: max(least, part_of(self.lines, padded)), self.size_name: padded}

    def programs(self, sizes: dict[str, int]) -> int:
        """How many programs the heads of one sequence have."""
        return self.num_heads * int(triton.cdiv(self.lines, sizes[self.lines_name]))


@dataclass(frozen=True, slots=True)
class Scan:
    """Of one layer what its kernels take: tensors, the first with a row for each token; sizes; limits."""

    given: tuple[torch.Tensor, ...]
    runs: torch.Tensor
    sizes: dict[str, Any]
    limits: tuple[float, ...] = ()

    def launch(self, one_by_one: Any, in_chunks: Any | None, part: HeadPart, warps: int = _WARPS) -> None:
        """Launch the kernel that takes tokens in one by one; before it, for prompts, the one for chunks."""
        num_rows, num_runs = len(self.given[0]), self.runs.shape[1]
        chunk = NO_CHUNKS.value
        if in_chunks is not None and may_have_chunks(num_rows, num_runs):
            chunk, sizes = CHUNK, part.sizes(CHUNK)
            sizes |= {"CHUNK": CHUNK, "RUNS_PADDED": _padded(num_runs)}
            grid = (min(num_runs, _AT_ONCE), part.programs(sizes))
            given = (*self.given, self.runs, num_runs, *self.limits)
            in_chunks[grid](*given, **self.sizes, **sizes, num_warps=warps)
        sizes = part.sizes()
        grid = (num_runs, part.programs(sizes))
        one_by_one[grid](*self.given, self.runs, num_runs, chunk, *self.limits, **self.sizes, **sizes)


def may_have_chunks(num_rows: int, num_runs: int) -> bool:
    """Whether of so many runs with so many rows one may have a whole chunk; False for any number of decodes.

    Recorded steps with prompts have room for more rows than runs.
    """
    return num_rows - num_runs >= CHUNK - 1


def _padded(num_runs: int) -> int:
    """As few numbers as may be: kernels are compiled for each."""
    if num_runs <= _FEW_RUNS:
        return _FEW_RUNS
    return max(_MANY_RUNS, int(triton.next_power_of_2(num_runs)))


class TritonScans:
    """A StateKernel: a scan is a launch, and one that clears its output: rows that no run has become 0.

    Where rows are of the dtypes `in_chunks`, prompts are taken in by chunks, in a launch more: in float32 the
    products would round more than the rest does. Not so those of `selective`, where no two numbers of a state
    decay alike. A token that is taken in by itself has the same bits in any company. Those of chunks are
    rounded as they lie in them, and a piece of a prompt begins with one.
    """

    def __init__(self, in_chunks: Collection[torch.dtype] = (torch.bfloat16, torch.float16)) -> None:
        self.in_chunks = in_chunks

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
        sizes = {"HEADS": heads, "SHARE": heads // key_heads, "KEYS": keys, "VALUES": values}
        given = (*(each.contiguous() for each in inputs), output, state)
        by_channel = inputs.logs.shape[-1] > 1
        scan = Scan(given, runs, sizes | {"BY_CHANNEL": by_channel})
        part = HeadPart(heads, values, keys, "COLUMNS", "KEYS_PADDED")
        in_chunks = delta_chunks_kernel if by_channel and output.dtype in self.in_chunks else None
        scan.launch(delta_kernel, in_chunks, part, WARPS_BY_CHANNEL)
        return output

    def gated_delta(self, inputs: GatedDelta, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor | None:
        """See StateKernel."""
        rows, (_, heads, keys, values) = inputs.rows, state.shape
        if keys > _MOST_SIZE or rows.stride(1) != 1 or not state.is_contiguous():
            return None
        output = rows.new_zeros(len(rows), heads, values)
        sizes = {"HEADS": heads, "SHARE": heads // inputs.key_heads, "KEYS": keys, "VALUES": values}
        constants = sizes | {"STRIDE": rows.stride(0), "SCALE": keys**-0.5, "BETA": inputs.beta}
        scan = Scan((rows, inputs.decays, inputs.bias, output, state), runs, constants)
        part = HeadPart(heads, values, keys, "COLUMNS", "KEYS_PADDED")
        in_chunks = gated_delta_chunks_kernel if rows.dtype in self.in_chunks else None
        scan.launch(gated_delta_kernel, in_chunks, part)
        return output

    def gated_structured(
        self, inputs: GatedStructured, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        rows, (_, heads, dim, size) = inputs.rows, state.shape
        if size > _MOST_SIZE or rows.stride(1) != 1 or not state.is_contiguous():
            return None
        output = torch.zeros(len(rows), heads, dim, device=rows.device)
        sizes = {"HEADS": heads, "SHARE": heads // inputs.groups, "DIM": dim, "SIZE": size}
        given = (rows, inputs.decays, inputs.bias, inputs.direct, output, state)
        scan = Scan(given, runs, sizes | {"STRIDE": rows.stride(0)}, inputs.limits)
        part = HeadPart(heads, dim, size, "ROWS", "SIZE_PADDED")
        in_chunks = gated_structured_chunks_kernel if rows.dtype in self.in_chunks else None
        scan.launch(gated_structured_kernel, in_chunks, part)
        return output

    def structured(
        self, inputs: StructuredInputs, state: torch.Tensor, runs: torch.Tensor
    ) -> torch.Tensor | None:
        """See StateKernel."""
        (_, heads, dim), (_, groups, size) = inputs.inputs.shape, inputs.b.shape
        if size > _MOST_SIZE or not state.is_contiguous():
            return None
        output = torch.zeros_like(inputs.inputs, memory_format=torch.contiguous_format)
        sizes = {"HEADS": heads, "SHARE": heads // groups, "DIM": dim, "SIZE": size}
        scan = Scan((*(each.contiguous() for each in inputs), output, state), runs, sizes)
        part = HeadPart(heads, dim, size, "ROWS", "SIZE_PADDED")
        in_chunks = structured_chunks_kernel if output.dtype in self.in_chunks else None
        scan.launch(structured_kernel, in_chunks, part)
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
