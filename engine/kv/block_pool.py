"""BlockPool: the ids of all KV blocks, how often each is referenced, and which is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids and takes them back; every operation is O(1) a block.

    A block is either referenced (count >= 1) or on the free list, never both. The free list is in LRU order:
    the block released longest ago is taken first. It is a linked map, so that a block may also be taken out
    of its middle in O(1), as reviving a cached block needs.
    """

    __slots__ = ("_free", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, least recently used first; None if there are too few."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, all referenced already."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each, in order; a block left without any goes to the tail of the free list."""
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released more often than taken"
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None

    def ref_count(self, block_id: int) -> int:
        """How many tables hold this block."""
        return self._ref_counts[block_id]

    def free_block_ids(self) -> tuple[int, ...]:
        """The free list, next to be reused first. O(free): for tests and integrity checks."""
        return tuple(self._free)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and referenced blocks partition the pool. O(blocks)."""
        free = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert free == set(self._free), f"free list {sorted(self._free)} but unreferenced {sorted(free)}"
