"""BlockPool: the ids of all KV blocks, how often each is referenced, and which is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 32  # at the end of a name of contents; before them stands their owner's tag, which may be empty
_PATIENCE = 16  # times as many blocks as there are: who has freed none while those were taken has no claim


class KeptBlocks:
    """A set of block ids in which each owner's are in LRU order; every operation is O(1).

    So an owner cannot push out what others keep with blocks of its own, except what was left there long ago.
    """

    __slots__ = ("_num_taken", "_of", "_owners_by_size", "_patience", "_size", "_used_at")

    def __init__(self, num_blocks: int) -> None:
        self._patience = _PATIENCE * num_blocks
        self._num_taken = self._size = 0
        self._of: OrderedDict[bytes, OrderedDict[int, None]] = OrderedDict()  # who freed one last comes last
        self._used_at: dict[bytes, int] = {}
        self._owners_by_size: list[OrderedDict[bytes, None]] = [OrderedDict()]  # none behind the largest

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return (block_id for block_ids in self._of.values() for block_id in block_ids)

    def add(self, block_id: int, owner: bytes) -> None:
        """As the owner's newest."""
        blocks = self._of.setdefault(owner, OrderedDict())
        blocks[block_id] = None
        self._size += 1
        self._of.move_to_end(owner)
        self._used_at[owner] = self._num_taken
        self._resize(owner, len(blocks) - 1, len(blocks))

    def remove(self, block_id: int, owner: bytes) -> None:
        """It is one of the owner's."""
        blocks = self._of[owner]
        del blocks[block_id]
        self._size -= 1
        self._resize(owner, len(blocks) + 1, len(blocks))
        if not blocks:
            del self._of[owner], self._used_at[owner]

    def take(self) -> int:
        """The oldest of who has the most, or of who has freed none for long; there is one at least."""
        self._num_taken += 1
        owner = next(iter(self._of))
        if self._num_taken - self._used_at[owner] <= self._patience:
            owner = next(iter(self._owners_by_size[-1]))
        block_id = next(iter(self._of[owner]))
        self.remove(block_id, owner)
        return block_id

    def _resize(self, owner: bytes, before: int, now: int) -> None:
        by_size = self._owners_by_size
        if now == len(by_size):
            by_size.append(OrderedDict())
        by_size[before].pop(owner, None)
        if now:
            by_size[now][owner] = None
        while len(by_size) > 1 and not by_size[-1]:
            by_size.pop()


class BlockPool:
    """Hands out block ids and takes them back; every operation is O(1) a block.

    A block is either referenced (count >= 1) or free. A free block whose contents are *kept* may be
    referenced again until it is taken. Blocks are taken in LRU order, kept ones only when there are no
    others, and then those of the owner who has the most. The free lists are linked maps, so that a block
    leaves their middle in O(1).
    """

    __slots__ = ("_free", "_free_kept", "_ref_counts", "kept", "num_blocks", "on_dropped", "on_taken")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_kept = KeptBlocks(num_blocks)
        self.kept: dict[int, bytes] = {}  # by name; free or not
        self.on_taken: Callable[[bytes], None] = lambda name: None  # what was kept under this name is gone
        self.on_dropped: Callable[[int], None] = lambda _: None  # what this block has is kept no longer

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._free) + len(self._free_kept)

    @property
    def num_free_kept(self) -> int:
        """Free blocks whose contents are kept."""
        return len(self._free_kept)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, none of them kept; None if there are too few."""
        plain = len(self._free)
        if count > plain + len(self._free_kept):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(min(count, plain))]
        for _ in range(count - plain):
            block_ids.append(self._free_kept.take())
            self.on_taken(self.kept.pop(block_ids[-1]))
            self.on_dropped(block_ids[-1])
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, all referenced already or kept."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert block_id in self.kept, f"block {block_id} is free and cannot be shared"
                self._free_kept.remove(block_id, _owner_of(self.kept[block_id]))
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each, in order; a block left with none goes to the tail of its free list."""
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released more often than taken"
            self._ref_counts[block_id] = count
            if count == 0 and block_id in self.kept:
                self._free_kept.add(block_id, _owner_of(self.kept[block_id]))
            elif count == 0:
                self._free[block_id] = None

    def keep(self, block_id: int, name: bytes) -> None:
        """From now on keep the contents of this block, which is referenced, under this name."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free: what it holds may be gone"
        self.kept[block_id] = name

    def drop(self, block_id: int) -> None:
        """Keep the contents of this block no longer."""
        name = self.kept.pop(block_id)
        self.on_dropped(block_id)
        if self._ref_counts[block_id] == 0:
            self._free_kept.remove(block_id, _owner_of(name))
            self._free[block_id] = None

    def ref_count(self, block_id: int) -> int:
        """How many tables hold this block."""
        return self._ref_counts[block_id]

    def ref_counts(self) -> NDArray[np.int64]:
        """How many tables hold each block. O(blocks): for integrity checks."""
        return np.array(self._ref_counts, np.int64)

    def free_kept_block_ids(self) -> tuple[int, ...]:
        """The free blocks whose contents are kept, of each owner the next to be taken first. O(free kept)."""
        return tuple(self._free_kept)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and referenced blocks partition the pool. O(blocks)."""
        is_free, is_kept = self.ref_counts() == 0, self._mask(self.kept)
        for listed, right in (
            (self._mask(self._free), is_free & ~is_kept),
            (self._mask(tuple(self._free_kept)), is_free & is_kept),
        ):
            wrong = np.flatnonzero(listed != right)
            assert not wrong.size, f"{wrong.size} blocks are on the wrong free list, {wrong[:8]} first"

    def _mask(self, block_ids: Collection[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self.num_blocks, np.bool_)
        mask[np.fromiter(block_ids, np.int64, len(block_ids))] = True
        return mask


def _owner_of(name: bytes) -> bytes:
    return name[:-HASH_BYTES]
