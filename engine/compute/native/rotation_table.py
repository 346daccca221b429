"""RotationTable: the cosines and sines of a model's positions, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Those of the kinds that transformers knows whose angles do not change with what else is in a pass.
_STATIC = frozenset({"default", "linear", "llama3", "yarn"})


class RotationTable:
    """What a model's own rotary module gives, by position. For one thread at a time.

    The module is asked each time where its angles are not known to depend on the position alone.
    """

    def __init__(self, rotary: nn.Module, like: torch.Tensor) -> None:
        """`like` is of the dtype and on the device that the angles are for."""
        self._rotary: Any = rotary
        self._like = like
        self._is_static = getattr(rotary, "rope_type", None) in _STATIC
        self._cos = self._sin = like.new_empty(0, 0)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at `positions`, int64 [n], contiguous: each [n, dim]."""
        if not self._is_static:
            return self._ask(positions)
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._cos, self._sin = self._ask(torch.arange(1 << (needed - 1).bit_length()))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _ask(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(self._like, position_ids=positions[None])
        return cos[0].contiguous(), sin[0].contiguous()
