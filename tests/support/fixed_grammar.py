"""Allowing: a grammar that allows the same tokens everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.plan.grammar import TokenMask


@dataclass(frozen=True)
class Allowing:
    """A Grammar that never ends a reply."""

    allowed: frozenset[int]
    vocab_size: int
    is_dear: bool = False

    def mask(self, path: Sequence[int]) -> TokenMask:
        """See Grammar."""
        bits = np.zeros(self.vocab_size, np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little")

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """See Grammar."""
        return len(token_ids)

    def foresee(self, token_ids: Sequence[int]) -> None:
        """See Grammar."""

    def accept(self, token_id: int) -> bool:
        """See Grammar."""
        return False
