"""The K/V shape of one attention layer: what sizing, allocating and attending need to agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Positions = TypeVar("Positions", int, NDArray[np.int64])


class Reach(NamedTuple):
    """How far back a token sees: `size` positions with its own, or those in its own chunk of `size`.

    Chunks are counted from position 0, as Llama 4 has them.
    """

    size: int
    in_chunks: bool = False

    @classmethod
    def of(cls, window: int | None, chunk: int | None) -> Reach | None:
        """None for a layer that sees everything before a token."""
        if chunk is not None:
            return cls(chunk, True)
        return None if window is None else cls(window)

    def first(self, positions: Positions) -> Positions:
        """The first position that a token at each of `positions` sees; below 0 where it sees them all."""
        return positions - (positions % self.size if self.in_chunks else self.size - 1)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps for each token: `num_kv_heads` keys of `key_dim` and values of `value_dim`.

    `window` is how many of the newest tokens a token sees, itself included; None sees all before it.
    With `chunk` it sees those of its own chunk of so many positions. `shares` is the place of an earlier
    layer whose keys and values this one reads: it keeps none of its own. `biased` where keys are scored by
    their positions as well (KeyBias). With `value_in_key` a value is the first numbers of its key, and not
    kept apart.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    shares: int | None = None
    biased: bool = False
    value_in_key: bool = False

    @property
    def reach(self) -> Reach | None:
        """How far back a token sees, None for all that is before it."""
        return Reach.of(self.window, self.chunk)
