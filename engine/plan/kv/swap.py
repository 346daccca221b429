"""SwapSpace: which host blocks hold the KV of swapped-out requests, and the copies still to be done."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from engine.plan.step_records import BlockCopy


class SwapSpace:
    """Accounts for host blocks. A request holds some from `save` until `release`; ids only, no tensor.

    `save` and `restore` ask for copies, `copies` hands them out for every step, and `confirm_copies` says
    that the step did them. After a step that failed it is unknown which were done: `drop_unsure` names the
    requests whose saved contents may be wrong. What was being restored is still here, and asked for again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is on top at first
        self._held: dict[str, list[int]] = {}
        self._saving: dict[str, tuple[BlockCopy, ...]] = {}
        self._restoring: dict[str, tuple[BlockCopy, ...]] = {}

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    @property
    def num_saved(self) -> int:
        """Requests whose KV is only here."""
        return len(self._held) - len(self._restoring)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def save(self, request_id: str, device_blocks: Sequence[int]) -> None:
        """Copy these blocks to the host before the next pass writes anything. There must be enough free."""
        assert request_id not in self._held, f"{request_id} is on the host already"
        assert len(device_blocks) <= len(self._free), f"{request_id} was found to fit the host and does not"
        held = [self._free.pop() for _ in device_blocks]
        self._held[request_id] = held
        self._saving[request_id] = tuple(map(BlockCopy, device_blocks, held))

    def restore(self, request_id: str, device_blocks: Sequence[int], first: int) -> None:
        """Copy a saved request's blocks from the `first` on back, onto the same places of `device_blocks`."""
        assert request_id not in self._saving, f"{request_id} is not on the host yet"
        held = self._held[request_id]
        self._restoring[request_id] = tuple(map(BlockCopy, held[first:], device_blocks[first : len(held)]))

    def stay(self, request_id: str) -> None:
        """Undo a `restore` that is not confirmed: the request stays saved."""
        del self._restoring[request_id]

    def drop_unsaved(self, request_id: str) -> bool:
        """Free what the request holds if no step has copied its KV here yet; True if so."""
        is_unsaved = request_id in self._saving
        if is_unsaved:
            self.release(request_id)
        return is_unsaved

    def release(self, request_id: str) -> None:
        """Free what the request holds, if anything; its copies not handed out yet are dropped."""
        self._free += reversed(self._held.pop(request_id, ()))
        self._saving.pop(request_id, None)
        self._restoring.pop(request_id, None)

    def copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """The copies to do before the next pass: to the host, then back."""
        if not self._saving and not self._restoring:
            return (), ()
        return tuple(chain(*self._saving.values())), tuple(chain(*self._restoring.values()))

    def confirm_copies(self) -> None:
        """The copies handed out last are done: what is back on the device leaves the host."""
        if self._restoring:
            for request_id in list(self._restoring):
                self.release(request_id)
        self._saving.clear()

    def drop_unsure(self) -> tuple[str, ...]:
        """Release the requests whose copies to the host may have been done or not; their ids."""
        request_ids = tuple(self._saving)
        for request_id in request_ids:
            self.release(request_id)
        return request_ids

    def check_integrity(self) -> None:
        """Raise AssertionError unless each host block is free or held once. O(blocks)."""
        held = [block_id for block_ids in self._held.values() for block_id in block_ids]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "host blocks are lost or doubled"
