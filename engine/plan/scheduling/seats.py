"""Seats: which requests run, what each of them holds, and who gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.kv.prefix_cache import extend_block_hashes
from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.scheduling.step_inputs import BlockMoves
from engine.plan.step_records import BlockCopy


class Seats:
    """The running requests. A seat is a row of block tables, KV blocks, and a row of sampling parameters.

    A seated request has blocks for all the tokens it knew when it was seated, so only growth by decoding can
    run out of blocks. Then the request ranked last by policy is preempted, but never the oldest: alone it
    always fits, so it goes on until it ends.

    Blocks are scrubbed when a request that held them may have left non-finite values there: it failed, or it
    left before a good row was drawn from all it had computed. A NaN spoils a weighted sum at weight zero too.
    Only what a good row was drawn from is published, and published blocks are not written again: they are
    never scrubbed, but those of a failed request are published no more, whoever computed them.

    A request whose prefix is published begins on those blocks, and one that forks begins on the blocks of its
    parent's prompt. Both still compute their last prompt token, whose logits they need.
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
        self.sampling = SamplingTable(kv.max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self._policy = policy
        self._clock = clock
        self._preemption = preemption or PreemptionPolicy()
        self._caching = prefix_caching
        self._running: dict[str, Request] = {}  # least recently served first when not all fit a step
        self._unproven: set[str] = set()  # hold KV that no good row has been drawn from
        self._scrub_blocks: list[int] = []
        self._copies: list[BlockCopy] = []  # for forks, in the next step
        self._forked: list[Request] = []  # those that need these copies

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        """The running requests, least recently served first when they take turns."""
        return iter(self._running.values())

    def get(self, request_id: str) -> Request | None:
        """The running request of this id."""
        return self._running.get(request_id)

    # Sitting down.

    def can_take(self, request: Request) -> bool:
        """True if a waiting request can be seated now.

        Beside its own blocks it must leave one for each running request, so that all of them can go on for a
        block's worth of steps before anybody has to be preempted.
        """
        if len(self._running) >= self._max_num_seqs:
            return False
        allowed = self.kv.num_free_blocks - len(self._running)
        if self._ready_parent(request) is not None:
            return allowed >= 1
        needed = self.kv.blocks_for(self._tokens_to_hold(request))
        if needed <= allowed:
            return True
        return self.kv.blocks_to_start(self._tokens_to_hold(request), self._find(request)) <= allowed

    def leader(self, request: Request) -> str | None:
        """Whom to hold this waiting request for: who runs and is computing what it would have to compute.

        That is the parent that it forks from, or who computes the next block of its prefix, provided that it
        ranks first: nobody is put off by somebody less urgent.
        """
        if (
            self.kv.can_rewind
            and request.status is RequestStatus.WAITING
            and request.fork_of in self._running
        ):
            return request.fork_of if request.fork_of in self._unproven else None
        if not self._caching or self.kv.is_on_host(request.request_id):
            return None
        found = self._find(request)
        if len(found) == self._num_findable(request):
            return None
        claimant = self._running.get(self.kv.claimant(request.block_hashes[len(found)]) or "")
        key = self._policy.key
        return None if claimant is None or key(claimant) > key(request) else claimant.request_id

    def take(self, request: Request) -> None:
        """Seat a request for which `can_take` is true."""
        parent = self._ready_parent(request)
        num_computed, num_cached = self._start(request) if parent is None else self._fork(parent, request)
        self._running[request.request_id] = request
        self._unproven.add(request.request_id)
        self.sampling.seat(self.kv.row(request.request_id), request)
        request.admit(self._clock(), num_computed, num_cached)

    def _start(self, request: Request) -> tuple[int, int]:
        """Begin on what is published or saved of its KV; the tokens computed, and those of them found."""
        kv, request_id = self.kv, request.request_id
        if kv.drop_unsaved(request_id):
            request.recompute_from(0)
        found = self._find(request)
        fits = kv.start(request_id, self._tokens_to_hold(request), found)
        assert fits, f"{request_id} was found to fit and does not"
        if kv.is_on_host(request_id):
            return request.num_computed_tokens, 0
        if self._caching:
            hashes = self._hashes(request, len(request.token_ids) // kv.block_size)
            kv.claim(request_id, hashes[len(found) :])
        return len(found) * kv.block_size, len(found) * kv.block_size

    def _fork(self, parent: Request, child: Request) -> tuple[int, int]:
        """Begin on the parent's prompt but for its last token, whose block is copied on write."""
        kv, child_id, last = self.kv, child.request_id, child.num_prompt_tokens - 1
        fits = kv.fork(parent.request_id, child_id)
        kv.rewind(child_id, last)
        copies = kv.copy_on_write(child_id, last)
        fits = fits and copies is not None and kv.allocate(child_id, child.num_prompt_tokens)
        assert fits and copies is not None, f"{child_id} was found to fit and does not"
        self._copies += copies
        self._forked.append(child)
        return last, parent.num_cached_tokens

    def _ready_parent(self, request: Request) -> Request | None:
        """Who this waiting request can be forked from now: its parent's prompt is computed and good."""
        if not self.kv.can_rewind or request.fork_of is None or request.scores_prompt:
            return None
        if request.status is not RequestStatus.WAITING:
            return None
        return None if request.fork_of in self._unproven else self._running.get(request.fork_of)

    def _tokens_to_hold(self, request: Request) -> int:
        """Those it knows; all it may ever know if it can be preempted no more."""
        return request.max_num_tokens if self._preemption.is_spent(request) else len(request.token_ids)

    def _num_findable(self, request: Request) -> int:
        """Full blocks that the request need not compute; at least one token always is."""
        if request.scores_prompt:
            return 0  # the logits of every prompt token are wanted, and nobody keeps logits
        saved = self.kv.is_on_host(request.request_id)
        num_tokens = request.num_computed_tokens if saved else len(request.token_ids) - 1
        return num_tokens // self.kv.block_size

    def _find(self, request: Request) -> list[int]:
        """The published blocks that this request can begin on."""
        if not self._caching:
            return []
        limit = self._num_findable(request)
        return self.kv.find(self._hashes(request, limit), limit)

    def num_to_compute(self, request: Request) -> int:
        """Known tokens of a waiting request that nobody has computed yet, or is computing; at least one."""
        if self.leader(request) is not None or self._ready_parent(request) is not None:
            return 1
        return len(request.token_ids) - len(self._find(request)) * self.kv.block_size

    def _hashes(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """The request's block hashes, at least `num_blocks`; each is computed once in its life."""
        hashes = request.block_hashes
        if len(hashes) < num_blocks:
            salt = request.cache_salt
            extend_block_hashes(hashes, request.token_ids, self.kv.block_size, num_blocks, salt)
        return hashes

    # Getting up.

    def leave(self, request: Request) -> None:
        """Get up; row and blocks stay held until `vacate`."""
        del self._running[request.request_id]

    def vacate(self, request_id: str) -> None:
        """Release the row and the blocks of a request that has left."""
        left_over = self.kv.free(request_id)
        if request_id in self._unproven:
            self._unproven.remove(request_id)
            self.scrub(left_over)

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

    # Running out of blocks.

    def make_room(self, decodes: Iterable[Request]) -> tuple[list[Request], list[Request]]:
        """Get each decode a slot for its newest token.

        Returns those preempted for it, maybe some of them, and those that must miss this step because they
        have no slot. Spent requests hold all their blocks, so nobody but the oldest ever has to.
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
        """Get each of these a slot for the token after its newest; if blocks are short, nobody, and False."""
        kv = self.kv
        num_growing = sum(len(request.token_ids) % kv.block_size == 0 for request in requests)
        if num_growing > kv.num_free_blocks:
            return False
        fit = [kv.allocate(request.request_id, len(request.token_ids) + 1) for request in requests]
        assert all(fit), "the blocks were counted and are not there"
        return True

    def make_room_for_drafts(self, request: Request, num_drafts: int) -> int:
        """Get slots for so many drafts after the newest token, or for fewer; how many. Preempts nobody.

        What every running request may need next, one block, is left free. `take_back_from_drafts` must follow
        when they are verified.
        """
        kv = self.kv
        num_tokens = len(request.token_ids)
        spare = max(0, kv.num_free_blocks - len(self._running))
        room = (kv.num_blocks_held(request.request_id) + spare) * kv.block_size - num_tokens
        count = min(num_drafts, room)
        return count if kv.allocate(request.request_id, num_tokens + count) else 0

    def take_back_from_drafts(self, request: Request) -> None:
        """Release the blocks that only rejected drafts needed. A spent request keeps all that it holds.

        It drafts into the blocks that it was seated with, and gets no others.
        """
        if not self._preemption.is_spent(request):
            self.kv.rewind(request.request_id, request.num_computed_tokens)

    def preempt(self, request: Request, *, may_swap: bool = True) -> None:
        """Take a running request's seat, and move its KV to the host or drop it. The caller queues it."""
        kv, request_id, num_computed = self.kv, request.request_id, request.num_computed_tokens
        swapped = kv.is_on_host(request_id) or (
            may_swap
            and self._preemption.swaps(num_computed, kv.blocks_for(num_computed), kv.num_free_host_blocks)
        )
        if swapped:
            kv.swap_out(request_id, num_computed)
        self.leave(request)
        self.vacate(request_id)
        request.preempt(self._clock(), swapped=swapped)

    def oldest(self) -> Request:
        """The running request that arrived first. Somebody must run."""
        return min(self._running.values(), key=lambda request: request.arrival)

    def may_preempt(self, request: Request) -> bool:
        """True if this request runs, is not the oldest, and can be preempted once more."""
        runs = request.status is RequestStatus.RUNNING
        return runs and request is not self.oldest() and not self._preemption.is_spent(request)

    # Values not to be trusted, and values for others.

    def prove(self, request: Request) -> bool:
        """A good row was drawn from all the KV this request has computed; True if that had been in doubt."""
        request_id = request.request_id
        if request_id in self._unproven:
            self._unproven.remove(request_id)
            if self._caching:
                self._publish(request)
            return True
        if self._caching and request.num_computed_tokens // self.kv.block_size > self.kv.num_published(
            request_id
        ):
            self._publish(request)
        return False

    def _publish(self, request: Request) -> None:
        num_blocks = request.num_computed_tokens // self.kv.block_size
        self.kv.publish(request.request_id, self._hashes(request, num_blocks), num_blocks)

    def doubt(self, request_id: str) -> None:
        """The KV that this request has been computing may be non-finite."""
        self._unproven.add(request_id)

    def distrust(self, request_id: str) -> None:
        """All the KV that this request holds may be non-finite, also what was found or published."""
        self._unproven.add(request_id)
        self.kv.unpublish(request_id)

    def trust(self, request_id: str) -> None:
        """A good row was drawn from all the KV that this request holds, after it had ended."""
        self._unproven.discard(request_id)

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Zero these blocks before the next pass."""
        self._scrub_blocks += block_ids

    # What the device must do before the next pass.

    def block_moves(self) -> BlockMoves:
        """The blocks to move with the next step; `settle` or `undo_moves` must tell what came of them."""
        swap_out, swap_in = self.kv.swap_copies()
        return self.scrubbing()._replace(swap_out=swap_out, copies=tuple(self._copies), swap_in=swap_in)

    def scrubbing(self) -> BlockMoves:
        """Those of a step that is decided before the last one is settled: it asks for nothing else twice."""
        moves = BlockMoves(scrub=tuple(self._scrub_blocks))
        self._scrub_blocks.clear()
        return moves

    def settle(self) -> None:
        """The step did its moves."""
        self.kv.confirm_copies()
        self._forget_forks()

    def undo_moves(self, moves: BlockMoves) -> tuple[str, ...]:
        """Nobody knows which moves a step did: ask for them again where that is possible.

        Blocks are scrubbed, and brought back from the host, once more. What was copied or saved may have
        changed since: a fork computes its last block from the start, and those returned, who all wait, have
        lost their KV.
        """
        self.scrub(moves.scrub)
        for request in self._forked:
            request.recompute_from(request.num_computed_tokens // self.kv.block_size * self.kv.block_size)
        self._forget_forks()
        return self.kv.drop_unsure()

    def _forget_forks(self) -> None:
        self._copies.clear()
        self._forked.clear()
