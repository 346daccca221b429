"""RotationTable: the cosines and sines of a model's positions, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from engine.compute.native.families import Family, family_of

# Those of the kinds that transformers knows whose angles do not change with what else is in a pass.
_STATIC = frozenset({"default", "linear", "llama3", "proportional", "yarn"})


class RotationTable:
    """What a model's own rotary module gives, by position. For one thread at a time.

    The module is asked each time where its angles are not known to depend on the position alone.
    """

    def __init__(self, rotary: nn.Module, like: torch.Tensor, layer_type: str | None = None) -> None:
        """`like` is of the dtype and on the device that the angles are for.

        A module that has other angles for each kind of layer needs to be told which.
        """
        self._family = family_of(rotary) or Family()
        self._rotary: Any = rotary if layer_type is None else partial(rotary, layer_type=layer_type)
        self._like = like
        kind = getattr(rotary, "rope_type", None)
        self.is_static = (kind.get(layer_type) if isinstance(kind, dict) else kind) in _STATIC
        self.whole = torch.empty(0, 0), torch.empty(0, 0)  # cosines and sines of the first positions

    @cached_property
    def width(self) -> int:
        """How many numbers of each head are rotated."""
        return self._ask(torch.zeros(1, dtype=torch.int64))[0].shape[1]

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at `positions`, int64 [n], contiguous and in float32: each [n, rotary].

        They are rounded as the module rounds them. Those of the second half are behind the first's.
        """
        if not self.is_static:
            return self._ask(positions)
        self.reach(int(positions.max()) + 1)
        cos, sin = self.whole
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def reach(self, length: int) -> bool:
        """Have so many positions in `whole`, where they are static; True if it is another than before."""
        is_short = length > len(self.whole[0])
        if is_short:
            self.whole = self._ask(torch.arange(1 << (length - 1).bit_length()))
        return is_short

    def _ask(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = in_halves(self._rotary(self._like, position_ids=positions[None]), self._family)
        return cos[0].float().contiguous(), sin[0].float().contiguous()


def in_halves(
    rotation: tuple[torch.Tensor, torch.Tensor], family: Family
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as a family gives them, brought into the order of halves: each [..., rotary]."""
    cos, sin = (_in_halves(part, family) for part in rotation)
    return cos, sin


def _in_halves(angles: torch.Tensor, family: Family) -> torch.Tensor:
    if family.has_half_angles:
        return torch.cat((angles, angles), dim=-1)
    if family.has_paired_angles:
        return torch.cat((angles[..., ::2], angles[..., 1::2]), dim=-1)
    return angles


def rotation_tables(rotary: Any, like: torch.Tensor) -> dict[str | None, RotationTable]:
    """The tables of a model's rotary module by kinds of layers; by None where all have one."""
    kinds = rotary.rope_type if isinstance(getattr(rotary, "rope_type", None), dict) else (None,)
    return {kind: RotationTable(rotary, like, kind) for kind in kinds}


def kind_of_layer(base: Any, index: int, tables: Mapping[str | None, RotationTable]) -> str | None:
    """Whose of these tables a layer of the model is given."""
    return None if None in tables else base.config.layer_types[index]
