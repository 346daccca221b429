"""RunningSet: which requests run, the blocks they hold, and which is preempted when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.prefix_lookup import PrefixLookup
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.scheduling.step_inputs import ScheduledItem
from engine.plan.step_records import BlockCopy, BlockMoves, StateCopy


class RunningSet:
    """The running requests. Each has a row of block tables, KV blocks, and a row of sampling parameters.

    A request is admitted with blocks for all the tokens it knows, so only growth by decoding can run out of
    blocks. Then the request ranked last by policy is preempted, but never the oldest: it always fits alone,
    so it goes on until it ends. `lookup` says what a request can share.
    """

    def __init__(
        self,
        max_num_seqs: int,
        kv: PagedKvManager,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
        preemption: PreemptionPolicy | None = None,
        prefix_caching: bool = False,
    ) -> None:
        assert kv.max_num_seqs >= max_num_seqs, "every running request needs a row of block tables"
        self.kv = kv
        self._running: dict[str, Request] = {}  # least recently served first when not all fit a step
        self.lookup = PrefixLookup(kv, self._running, policy.key, prefix_caching)
        self.sampling = SamplingTable(kv.max_num_seqs)
        self.max_num_seqs = max_num_seqs
        self._policy = policy
        self._clock = clock
        self._preemption = preemption or PreemptionPolicy()
        self._copies: list[BlockCopy] = []  # for forks, in the next step
        self._forked: list[Request] = []  # the requests that need these copies
        self._restores: list[StateCopy] = []  # of states, in the next step
        self._state_copies: list[StateCopy] = []  # for forks, in the next step

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        """The running requests, least recently served first when they take turns."""
        return iter(self._running.values())

    def get(self, request_id: str) -> Request | None:
        """The running request of this id."""
        return self._running.get(request_id)

    def can_admit(self, request: Request) -> bool:
        """True if a waiting request can run now, and one block is left for each running request."""
        if len(self._running) >= self.max_num_seqs:
            return False
        allowed = self.kv.pool.num_free - len(self._running)
        num_tokens = self._tokens_to_hold(request)
        if self.lookup.ready_parent(request) is not None:
            num_shared = (request.num_prompt_tokens - 1) // self.kv.block_size
            return self.kv.blocks_for(num_tokens) - num_shared <= allowed
        if self.kv.blocks_for(num_tokens) <= allowed:
            return True
        return self.kv.blocks_to_start(num_tokens, self.lookup.find(request)) <= allowed

    def admit(self, request: Request) -> None:
        """Run a request for which `can_admit` is true."""
        parent = self.lookup.ready_parent(request)
        num_computed, num_cached = self._start(request) if parent is None else self._fork(parent, request)
        self._running[request.request_id] = request
        self.kv.mark_kv_suspect(request.request_id)
        self.sampling.write(self.kv.row(request.request_id), request)
        request.admit(self._clock(), num_computed, num_cached)

    def _start(self, request: Request) -> tuple[int, int]:
        """Begin on what is published or saved of its KV; the tokens computed, and those of them found."""
        kv, request_id = self.kv, request.request_id
        if kv.host.drop_unsaved(request_id):
            request.recompute_from(0)
        found = self.lookup.find(request)
        fits = kv.start(request_id, self._tokens_to_hold(request), found)
        assert fits, f"{request_id} was found to fit and does not"
        if request_id in kv.host:
            num_computed = request.num_computed_tokens
            if kv.keeps_state:
                self.lookup.stops.begin(request_id, num_computed, num_computed)
            return num_computed, 0
        self.lookup.claim(request, len(found))
        if kv.keeps_state and found:
            snapshot = kv.snapshots.begin_on(request_id, request.block_hashes[len(found) - 1])
            self._restores.append(StateCopy(snapshot, kv.row(request_id)))
        return len(found) * kv.block_size, len(found) * kv.block_size

    def _fork(self, parent: Request, child: Request) -> tuple[int, int]:
        """Begin on the parent's prompt but for its last token, whose block is copied on write."""
        kv, child_id, last = self.kv, child.request_id, child.num_prompt_tokens - 1
        fits = kv.fork(parent.request_id, child_id)
        kv.rewind(child_id, last)
        copies = kv.copy_on_write(child_id, last)
        fits = fits and copies is not None and kv.allocate(child_id, self._tokens_to_hold(child))
        assert fits and copies is not None, f"{child_id} was found to fit and does not"
        self._copies += copies
        kv.begin_copies(copies)
        self._forked.append(child)
        if kv.keeps_state:
            self._state_copies.append(StateCopy(kv.row(parent.request_id), kv.row(child_id)))
            self.lookup.stops.begin(child_id, last, last)
        return last, parent.num_cached_tokens

    def _tokens_to_hold(self, request: Request) -> int:
        """The tokens it knows; all it may ever know if it must not be preempted again."""
        return request.max_num_tokens if self._preemption.is_spent(request) else len(request.token_ids)

    def remove(self, request: Request) -> None:
        """The request runs no more; its row and blocks stay held until `kv.free`."""
        del self._running[request.request_id]
        self.lookup.stops.end(request.request_id)

    def take_turns(self, decodes: list[Request], limit: int) -> list[Request]:
        """The `limit` of `decodes` that were served least recently, or, without turns, that rank best."""
        if len(decodes) <= limit:
            return decodes
        if not self._policy.takes_turns:
            return sorted(decodes, key=self._policy.key)[:limit]
        chosen = decodes[:limit]
        for request in chosen:  # to the back of the line
            self._running[request.request_id] = self._running.pop(request.request_id)
        return chosen

    def make_room(self, decodes: Iterable[Request]) -> tuple[list[Request], list[Request]]:
        """Get each decode a slot for its newest token, preempting others where blocks are short.

        Returns the preempted requests, which may be among `decodes`, and those that get no slot and miss
        this step. Spent requests hold all their blocks, so only the oldest ever misses one.
        """
        preempted: list[Request] = []
        stalled: list[Request] = []
        for request in decodes:
            while request.status is RequestStatus.RUNNING:
                if self.kv.allocate(request.request_id, len(request.token_ids)):
                    break
                victim = self._preemption.victim(self, self.oldest(), self._policy.key)
                if victim is None:
                    stalled.append(request)
                    break
                self.preempt(victim)
                preempted.append(victim)
        return preempted, stalled

    def make_room_ahead(self, requests: Sequence[Request]) -> bool:
        """Get each of these a slot for the token after its newest; False, and none, if blocks are short."""
        kv = self.kv
        num_growing = sum(len(request.token_ids) % kv.block_size == 0 for request in requests)
        if num_growing > kv.pool.num_free:
            return False
        fit = [kv.allocate(request.request_id, len(request.token_ids) + 1) for request in requests]
        assert all(fit), "the blocks were counted and are not there"
        return True

    def make_room_for_drafts(self, request: Request, num_drafts: int) -> int:
        """Get slots for up to `num_drafts` drafts after the newest token; how many. Preempts nothing.

        One block is left free for each running request. `release_draft_room` must follow once the drafts are
        verified.
        """
        kv = self.kv
        num_tokens = len(request.token_ids)
        spare = max(0, kv.pool.num_free - len(self._running))
        room = (kv.num_blocks_held(request.request_id) + spare) * kv.block_size - num_tokens
        assert room >= 0, f"{request.request_id} has no slot for its newest token"
        count = min(num_drafts, room)
        return count if kv.allocate(request.request_id, num_tokens + count) else 0

    def release_draft_room(self, request: Request) -> None:
        """Release the blocks that only rejected drafts needed. A spent request keeps all its blocks."""
        if not self._preemption.is_spent(request):
            self.kv.rewind(request.request_id, request.num_computed_tokens)

    def preempt(self, request: Request, *, may_swap: bool = True) -> None:
        """Stop a running request, and move its KV to the host or drop it. The caller queues it again."""
        kv, request_id, num_computed = self.kv, request.request_id, request.num_computed_tokens
        num_blocks = kv.blocks_for(num_computed)
        may_swap = may_swap and not self._awaits_state(request_id)
        swapped = request_id in kv.host or (
            may_swap
            and self._preemption.swaps(num_computed, num_blocks, has_room=kv.host.has_room(num_blocks))
        )
        if swapped:
            kv.swap_out(request_id, num_computed)
        self.remove(request)
        kv.free(request_id)
        request.preempt(self._clock(), swapped=swapped)

    def _awaits_state(self, request_id: str) -> bool:
        """True if the next step is to copy a state into this request's slot: there is none to save yet."""
        row = self.kv.row(request_id)
        return any(copy.target == row for copy in (*self._restores, *self._state_copies))

    def restart(self, request: Request) -> bool:
        """Have a running request's state and KV computed from its first token on; False if blocks are short.

        Nothing has changed then. Its blocks are its own afterwards, and are zeroed before the next pass.
        """
        kv, request_id = self.kv, request.request_id
        if kv.copy_on_write(request_id, 0) is None:  # what they hold is not needed
            return False
        kv.host.release(request_id)  # it was to be brought back
        request.recompute_from(0)
        kv.scrub(kv.block_ids(request_id))
        self.lookup.stops.begin(request_id, 0, 0)
        return True

    def oldest(self) -> Request:
        """The running request that arrived first. There must be one."""
        return min(self._running.values(), key=lambda request: request.arrival)

    def may_preempt(self, request: Request) -> bool:
        """True if this request runs, is not the oldest, and can be preempted once more."""
        runs = request.status is RequestStatus.RUNNING
        return runs and request is not self.oldest() and not self._preemption.is_spent(request)

    def to_yield(self, waiting: Request) -> Request | None:
        """The running request to preempt for one that waits in vain; None if no tenant is over its share."""
        lane = self._policy.lane_to_yield(waiting, self)
        own = [request for request in self if lane is not None and self._policy.lane(request) == lane]
        return self._preemption.victim(own, self.oldest(), self._policy.key) if own else None

    def block_moves(self, items: Sequence[ScheduledItem] = ()) -> BlockMoves:
        """What the next step, of these, moves; `confirm_block_moves` or `undo_block_moves` must follow."""
        for request in (item.request for item in items if item.is_held_back):
            self.kv.hold_state(request.request_id, request.num_prompt_tokens - 1)
        return self.kv.host.copies()._replace(
            scrub_blocks=self.kv.take_scrub_blocks(),
            block_copies=tuple(self._copies),
            state_restores=tuple(self._restores),
            state_copies=tuple(self._state_copies),
            state_saves=self.lookup.stops.saves(items),
        )

    def block_moves_ahead(self, items: Sequence[ScheduledItem]) -> BlockMoves:
        """What to move with a step of these behind the one in flight, which does all the rest."""
        return BlockMoves(
            scrub_blocks=self.kv.take_scrub_blocks(), state_saves=self.lookup.stops.saves(items)
        )

    def confirm_block_moves(self) -> None:
        """The step did its moves."""
        self.kv.end_scrub()
        self.kv.end_copies()
        self.kv.host.confirm_copies()
        self._copies, self._forked, self._restores, self._state_copies = [], [], [], []
        self.lookup.begin_step()

    def undo_block_moves(self, moves: BlockMoves) -> tuple[str, ...]:
        """A step failed and may have done any of its moves: ask again for those that can be repeated.

        Zeroing and copies from the host are repeated. What was copied or saved may have changed since: a fork
        computes its last block from the start, and the waiting requests returned have lost their KV. States
        are the caller's: they have to be computed from the first token on, or found again.
        """
        self.kv.end_scrub()
        self.kv.end_copies()
        self.kv.scrub(moves.scrub_blocks)
        for request in self._forked:
            request.recompute_from(request.num_computed_tokens // self.kv.block_size * self.kv.block_size)
        self._copies, self._forked, self._restores, self._state_copies = [], [], [], []
        return self.kv.host.drop_unsure()
