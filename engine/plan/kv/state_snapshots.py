"""StateSnapshots: where the states of recurrent models are kept that stood at the ends of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Held:
    """What a running request has saved: by blocks in front of it if not published yet, then by hash."""

    pending: dict[int, int] = field(default_factory=dict)
    hashes: list[bytes] = field(default_factory=list)  # published by it, or begun on
    newest: bytes | None = None  # of its output, which the next one replaces


class StateSnapshots:
    """Which of `num_slots` snapshots has the state behind the block of which hash. Accounting only.

    A request reserves a snapshot for a boundary that its step reaches, and publishes it with its blocks,
    once they are good; until then nobody finds it. Snapshots are taken in LRU order, never those that wait to
    be published. What a step restores may be taken for what it saves, since it restores first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """How many can be found."""
        return len(self._slot_of)

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Of the sequences of blocks that these begin with, the blocks of the longest that has a snapshot."""
        slot_of = self._slot_of
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in slot_of), 0)

    def begin_on(self, request_id: str, block_hash: bytes) -> int:
        """The snapshot behind this block, which `longest` found: the request begins on it."""
        self._held.setdefault(request_id, _Held()).hashes.append(block_hash)
        self._slot_of.move_to_end(block_hash)
        return self._slot_of[block_hash]

    def reserve(self, request_id: str, num_blocks: int, *, is_output: bool) -> int | None:
        """A snapshot to save the request's state in behind so many blocks; None if all wait for something.

        One of its output takes the place of the one before: the next turn of a chat needs the last alone.
        """
        held = self._held.setdefault(request_id, _Held())
        if num_blocks in held.pending:
            return held.pending[num_blocks]
        if is_output and held.newest is not None:
            self.forget(held.newest)
            held.newest = None
        if not self._free and self._slot_of:
            self._free.append(self._slot_of.popitem(last=False)[1])
        if not self._free:
            return None
        held.pending[num_blocks] = self._free.pop()
        return held.pending[num_blocks]

    def pending(self, request_id: str) -> Sequence[int]:
        """The blocks in front of each snapshot that the request has yet to publish."""
        held = self._held.get(request_id)
        return () if held is None else tuple(held.pending)

    def publish(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_output_from: int,
        can_be_found: Callable[[bytes], bool],
    ) -> None:
        """Let what the request saved behind blocks of these hashes be found, as far as the blocks can be.

        Those behind more than `num_output_from` blocks are of its output.
        """
        held = self._held.get(request_id)
        if held is None:
            return
        for num_blocks in sorted(held.pending):
            if num_blocks > len(hashes):
                break
            slot, block_hash = held.pending.pop(num_blocks), hashes[num_blocks - 1]
            if block_hash in self._slot_of or not can_be_found(block_hash):
                self._free.append(slot)
                continue
            self._slot_of[block_hash] = slot
            held.hashes.append(block_hash)
            if num_blocks > num_output_from:
                held.newest = block_hash

    def forget(self, block_hash: bytes) -> None:
        """Let the snapshot behind this block be found no more, if there is one: its block is gone."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def drop_pending(self, request_id: str) -> None:
        """What the request has saved and not published is not to be relied on."""
        held = self._held.get(request_id)
        if held is not None:
            self._free += held.pending.values()
            held.pending.clear()

    def withdraw(self, request_id: str) -> None:
        """Nothing that this request began on or saved is to be found again."""
        self.drop_pending(request_id)
        held = self._held.get(request_id)
        for block_hash in () if held is None else held.hashes:
            self.forget(block_hash)

    def close(self, request_id: str) -> None:
        """The request runs no more; what it published stays."""
        self.drop_pending(request_id)
        self._held.pop(request_id, None)

    def check_integrity(self, can_be_found: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless each snapshot is free, found or pending, and found behind a block."""
        pending = [slot for held in self._held.values() for slot in held.pending.values()]
        slots = sorted([*self._free, *self._slot_of.values(), *pending])
        assert slots == list(range(self.num_slots)), f"snapshots are lost or doubled: {slots}"
        assert all(map(can_be_found, self._slot_of)), "a snapshot outlives its block"
