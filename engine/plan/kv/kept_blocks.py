"""KeptBlocks: the free blocks whose contents are kept, by owner; who has the most gives the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

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
