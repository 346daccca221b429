"""SwapSpace: the host blocks and states that swapped-out requests hold, and the copies still to be done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from engine.plan.step_records import BlockCopy, BlockMoves, StateCopy


class SwapSpace:
    """Accounts for host memory. A request holds blocks from `save` until `release`; ids only, no tensor.

    Where a model carries state beside its blocks there are `num_states` for that, and a request holds one;
    None is for other models.

    `save` and `restore` ask for copies, `copies` hands them out for every step, and `confirm_copies` says
    that the step did them. After a step that failed it is unknown which were done: `drop_unsure` names the
    requests whose saved contents may be wrong. What was being restored is still here, and asked for again.
    """

    def __init__(self, num_blocks: int, num_states: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_states = num_states
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block is on top at first
        self._free_states = list(range((num_states or 0) - 1, -1, -1))  # likewise
        self._held: dict[str, list[int]] = {}
        self._states: dict[str, int] = {}
        self._saving: dict[str, BlockMoves] = {}
        self._restoring: dict[str, BlockMoves] = {}

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a request with so many blocks can be saved."""
        return num_blocks <= len(self._free) and (self.num_states is None or bool(self._free_states))

    @property
    def num_saved(self) -> int:
        """Requests whose KV is only here."""
        return len(self._held) - len(self._restoring)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def save(self, request_id: str, device_blocks: Sequence[int], slot: int = 0) -> None:
        """Copy these blocks, and the state in `slot`, to the host before the next pass writes anything.

        There must be room.
        """
        assert request_id not in self._held, f"{request_id} is on the host already"
        assert self.has_room(len(device_blocks)), f"{request_id} was found to fit the host and does not"
        held = self._held[request_id] = [self._free.pop() for _ in device_blocks]
        copies = tuple(map(BlockCopy, device_blocks, held))
        states: tuple[StateCopy, ...] = ()
        if self.num_states is not None:
            state = self._states[request_id] = self._free_states.pop()
            states = (StateCopy(slot, state),)
        self._saving[request_id] = BlockMoves(swap_out=copies, states_out=states)

    def restore(self, request_id: str, device_blocks: Sequence[int], first: int, slot: int = 0) -> None:
        """Copy a saved request's blocks from the `first` on back, onto the same places of `device_blocks`.

        Its state goes to `slot`.
        """
        assert request_id not in self._saving, f"{request_id} is not on the host yet"
        held, state = self._held[request_id], self._states.get(request_id)
        copies = tuple(map(BlockCopy, held[first:], device_blocks[first : len(held)]))
        states = () if state is None else (StateCopy(state, slot),)
        self._restoring[request_id] = BlockMoves(swap_in=copies, states_in=states)

    def stay(self, request_id: str) -> None:
        """Undo a `restore` that is not confirmed: the request stays saved."""
        del self._restoring[request_id]

    def has_copied(self, request_id: str) -> bool:
        """True once a step has copied the request's KV here."""
        return request_id in self._held and request_id not in self._saving

    def sources(self) -> Iterator[int]:
        """The device blocks that no step has copied here yet."""
        return (copy.source for moves in self._saving.values() for copy in moves.swap_out)

    def drop_unsaved(self, request_id: str) -> bool:
        """Free what the request holds if no step has copied its KV here yet; True if so."""
        is_unsaved = request_id in self._saving
        if is_unsaved:
            self.release(request_id)
        return is_unsaved

    def release(self, request_id: str) -> None:
        """Free what the request holds, if anything; its copies not handed out yet are dropped."""
        self._free += reversed(self._held.pop(request_id, ()))
        if request_id in self._states:
            self._free_states.append(self._states.pop(request_id))
        self._saving.pop(request_id, None)
        self._restoring.pop(request_id, None)

    def copies(self) -> BlockMoves:
        """Those to do before the next pass, and nothing else."""
        out, back = self._saving.values(), self._restoring.values()
        return BlockMoves(
            swap_out=tuple(chain.from_iterable(each.swap_out for each in out)),
            swap_in=tuple(chain.from_iterable(each.swap_in for each in back)),
            states_out=tuple(chain.from_iterable(each.states_out for each in out)),
            states_in=tuple(chain.from_iterable(each.states_in for each in back)),
        )

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
        """Raise AssertionError unless each host block and state is free or held once. O(blocks)."""
        held = [block_id for block_ids in self._held.values() for block_id in block_ids]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "host blocks are lost or doubled"
        states = [*self._free_states, *self._states.values()]
        assert sorted(states) == list(range(self.num_states or 0)), "host states are lost or doubled"
        assert self.num_states is None or self._states.keys() == self._held.keys(), "states without blocks"
