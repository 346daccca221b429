"""EagleKv: keys and values of one layer for many sequences, each in a slab of its own that slides along."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv


@dataclass(slots=True)
class Slab:
    """Where a sequence lies: in the first `num_kept` slots are verified positions, oldest first."""

    index: int
    num_kept: int = 0


class EagleKv:
    """`num_slabs` sequences; the least recently used one gives way. Used by one thread at a time.

    `keys` and `values` are [slabs, kv_heads, slots, their dim]: of `tensors`, in which a slab is a block. It
    has room for two windows and a draft: when it is full, the newest window moves to its beginning. Slots
    follow each other, positions need not.
    """

    def __init__(
        self, layer: LayerKv, window: int, num_slabs: int, most_drafts: int, like: torch.Tensor
    ) -> None:
        """`layer` says what is kept of a position, `like` has the dtype and device of it."""
        self.window = window
        self.most_drafts = most_drafts
        self.num_slots = slots_for(window, most_drafts)
        self.tensors = KvTensors((layer,), num_slabs, self.num_slots, like.dtype, like.device)
        self.keys = self.tensors.keys[0]
        self.values = self.tensors.values[0][..., : layer.value_dim]  # which may be in the keys
        self._free = list(range(num_slabs))
        self._slabs: dict[str, Slab] = {}  # least recently used first

    def slab(self, request_id: str, num_new: int, current: Collection[str]) -> Slab | None:
        """The sequence's slab, with room for `num_new` positions and a draft; None if `current` have all."""
        slab = self._slabs.pop(request_id, None)
        if slab is None:
            if not self._free:
                victim = next((other for other in self._slabs if other not in current), None)
                if victim is None:
                    return None
                self.drop(victim)
            slab = Slab(self._free.pop())
        self._slabs[request_id] = slab
        if slab.num_kept + num_new > 2 * self.window:
            self._slide(slab, max(0, self.window - num_new))
        return slab

    def drop(self, request_id: str) -> None:
        """Forget a sequence; unknown ones are passed over."""
        slab = self._slabs.pop(request_id, None)
        if slab is not None:
            self._free.append(slab.index)

    def _slide(self, slab: Slab, num_kept: int) -> None:
        first = slab.num_kept - num_kept
        for pages in self.tensors.tensors:
            own = pages[slab.index]
            own[:, :num_kept] = own[:, first : slab.num_kept].clone()
        slab.num_kept = num_kept


def slots_for(window: int, most_drafts: int) -> int:
    """How many positions a slab holds."""
    return 2 * window + most_drafts
