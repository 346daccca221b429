"""The K/V shape of one attention layer: what sizing, allocating and attending need to agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps for each token: `num_kv_heads` keys of `key_dim` and values of `value_dim`.

    `window` is how many of the newest tokens a token sees, itself included; None sees all before it.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
