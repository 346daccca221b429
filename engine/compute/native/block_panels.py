"""BlockPanels: weights of few bits, or elements, in the panels that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import BLOCKS, MIXED, NUMBERS

# The formats of elements and of floats of 8 bits with a scale for each 128; all others are ggml's numbers.
PLAIN, F8_E4M3 = 0, 1000


@dataclass(frozen=True, slots=True)
class BlockPanels:
    """Weights [out, in_features] in one format. `panels` is bytes [panels of 32 outputs, bytes of one]."""

    format: int
    panels: torch.Tensor
    out: int
    in_features: int

    @property
    def rows(self) -> torch.Tensor:
        """Of each panel its format and its address, int64 [panels, 2]; good for as long as `panels` is."""
        step, num = self.panels.stride(0) * self.panels.itemsize, len(self.panels)
        addresses = self.panels.data_ptr() + step * torch.arange(num)
        return torch.stack((torch.full((num,), self.format), addresses), dim=1)


def joined(parts: Sequence[BlockPanels], bias: torch.Tensor | None = None) -> PackedWeights:
    """The parts' outputs side by side, as `NativeKernels.linear` takes them; nothing is copied.

    All but the last part have whole panels.
    """
    table = torch.cat([part.rows for part in parts])
    kind = _kind_of(parts)
    out = sum(part.out for part in parts)
    return PackedWeights(kind, table, bias, out, parts[0].in_features, parts=tuple(parts))


def joined_by_experts(
    gates: Sequence[BlockPanels],
    ups: Sequence[BlockPanels],
    count: int,
    bias: torch.Tensor | None = None,
) -> PackedWeights:
    """Gates and ups of `count` experts, each one expert behind the other, as the kernels take both.

    That is each expert's gate before its up, as in `bias`. An expert's outputs fill whole panels.
    """
    gate, up = (joined(parts) for parts in (gates, ups))
    table = torch.stack([part.packed.view(count, -1, 2) for part in (gate, up)], dim=1)
    both = (*gate.parts, *up.parts)
    packed = table.flatten(0, 2).contiguous()
    return PackedWeights(_kind_of(both), packed, bias, gate.out + up.out, gate.in_features, both)


def _kind_of(parts: Sequence[BlockPanels]) -> int:
    """Whether rows are multiplied with these as integers in blocks, as numbers, or both."""
    as_numbers = {part.format in (PLAIN, F8_E4M3) for part in parts}
    if len(as_numbers) > 1:
        return MIXED
    return NUMBERS if as_numbers == {True} else BLOCKS
