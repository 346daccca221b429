"""How the tokens of RWKV's layers meet: weighted means over all tokens so far, and the token before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import ScanBlock
from engine.compute.recurrent.state_space import scan

_BLOCK = 64
_NEVER = -1e38  # the largest exponent of nothing


def wkv_scan(keys: Tensor, values: Tensor, decay: Tensor, first: Tensor, slots: LayerSlots) -> Tensor:
    """The mean of values by exp(keys), each decayed by `decay` a token, the newest with `first` more.

    `keys` and `values` are [M, channels], `decay` (negative) and `first` [channels]; all float32. Gives
    [M, channels]. A state [3, channels] is two sums and the largest exponent, which they are divided by.
    Peng et al., "RWKV", 2023.
    """

    def advance(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = parts  # [n, T, channels]
        sums = state.unbind(1)
        output, kept = torch.empty_like(values), state
        for place in range(block.shape[1]):
            key, value = keys[:, place], values[:, place]
            total, weight, _ = _added(sums, key + first, value)
            output[:, place] = total / weight
            sums = _added((*sums[:2], sums[2] + decay), key, value)
            kept = _kept(torch.stack(sums, 1), kept, block, place)
        return output, kept

    return scan((keys, values), slots, _BLOCK, torch.empty_like(values), advance)


def previous_scan(rows: Tensor, slots: LayerSlots) -> Tensor:
    """The row of the token before each of `rows` [M, width], zeros before the first; the state is a row."""

    def advance(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
        (rows,) = parts  # [n, T, width]
        before, kept = torch.cat((state[:, None], rows[:, :-1]), dim=1), state
        for place in range(block.shape[1]):
            kept = _kept(rows[:, place], kept, block, place)
        return before, kept

    return scan((rows,), slots, _BLOCK, torch.empty_like(rows), advance)


def _added(sums: Sequence[Tensor], exponent: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both sums and their largest exponent with one more value; nothing is in them while they are zeros."""
    total, weight, largest = sums
    largest = torch.where(weight > 0, largest, _NEVER)
    top = torch.maximum(largest, exponent)
    old, new = torch.exp(largest - top), torch.exp(exponent - top)
    return old * total + new * value, old * weight + new, top


def _kept(state: Tensor, before: Tensor, block: ScanBlock, place: int) -> Tensor:
    """`state` where the block takes the token at `place` in."""
    if block.taken is None:
        return state
    return torch.where(block.taken[:, place].view(-1, *[1] * (state.ndim - 1)), state, before)
