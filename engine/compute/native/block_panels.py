"""BlockPanels: weights of few bits, or elements, in the panels that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import BLOCKS, MIXED

PLAIN = 0  # the format of elements; the others are ggml's numbers


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
    kind = MIXED if any(part.format == PLAIN for part in parts) else BLOCKS
    out = sum(part.out for part in parts)
    return PackedWeights(kind, table, bias, out, parts[0].in_features, parts=tuple(parts))


def joined_by_experts(gates: Sequence[BlockPanels], ups: Sequence[BlockPanels], count: int) -> PackedWeights:
    """Gates and ups of `count` experts, each one expert behind the other, as the kernels take both.

    That is each expert's gate before its up. An expert's outputs fill whole panels.
    """
    gate, up = (joined(parts) for parts in (gates, ups))
    table = torch.stack([part.packed.view(count, -1, 2) for part in (gate, up)], dim=1)
    kind = max(gate.kind, up.kind)
    return PackedWeights(
        kind,
        table.flatten(0, 2).contiguous(),
        None,
        gate.out + up.out,
        gate.in_features,
        (*gate.parts, *up.parts),
    )
