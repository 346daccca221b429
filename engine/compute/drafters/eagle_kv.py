"""EagleKv: keys and values of one layer for many sequences, each in a slab of its own that slides along."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from engine.compute.attention.layer_kv import LayerKv


class Span(NamedTuple):
    """So many rows of one sequence: their keys and values belong into its slab from slot `first` on."""

    slab: int
    first: int
    num_rows: int


def last_rows(spans: Sequence[Span]) -> list[int]:
    """Each span's last row, among the rows of all."""
    return [stop - 1 for stop in accumulate(span.num_rows for span in spans)]


def of_last_rows(rows: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """`rows` [N, ...] of the spans' last rows; themselves where each span has one row."""
    return rows if len(rows) == len(spans) else rows[last_rows(spans)]


@dataclass(slots=True)
class Slab:
    """Where a sequence lies: in the first `num_kept` slots are verified positions, oldest first."""

    index: int
    num_kept: int = 0


class EagleKv:
    """`num_slabs` sequences; the least recently used one gives way. Used by one thread at a time.

    `keys` and `values` are [slabs, kv_heads, slots, their dim]. A slab has room for two windows and a draft:
    when it is full, the newest window moves to its beginning. Slots follow each other, positions need not.
    """

    def __init__(
        self, layer: LayerKv, window: int, num_slabs: int, most_drafts: int, like: torch.Tensor
    ) -> None:
        """`layer` says what is kept of a position, `like` has the dtype and device of it."""
        self.window = window
        self.most_drafts = most_drafts
        self.num_slots = slots_for(window, most_drafts)
        places = num_slabs, layer.num_kv_heads, self.num_slots
        self.keys = like.new_zeros((*places, layer.key_dim))
        self.values = like.new_zeros((*places, layer.value_dim))
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

    def take(
        self, span: Span, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep the rows' keys and values [count, kv_heads, dim], and give what these rows see.

        That is keys and values [kv_heads, seen, dim] and where each row may look among them, [count, seen].
        """
        slab, first, stop = span.slab, span.first, span.first + span.num_rows
        self.keys[slab, :, first:stop] = key.transpose(0, 1)
        self.values[slab, :, first:stop] = value.transpose(0, 1)
        begin = max(0, first + 1 - self.window)
        slots = torch.arange(begin, stop, device=key.device)
        own = torch.arange(first, stop, device=key.device)[:, None]
        seen = (slots <= own) & (slots > own - self.window)
        return self.keys[slab, :, begin:stop], self.values[slab, :, begin:stop], seen

    def _slide(self, slab: Slab, num_kept: int) -> None:
        first = slab.num_kept - num_kept
        for pages in (self.keys, self.values):
            own = pages[slab.index]
            own[:, :num_kept] = own[:, first : slab.num_kept].clone()
        slab.num_kept = num_kept


def slots_for(window: int, most_drafts: int) -> int:
    """How many positions a slab holds."""
    return 2 * window + most_drafts
