"""Seats: which requests run, what each of them holds, and who gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from engine.kv.paged_kv_manager import PagedKvManager
from engine.request import Request, RequestStatus
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.sampling_table import SamplingTable


class Seats:
    """The running requests. A seat is a row of block tables, KV blocks, and a row of sampling parameters.

    A seated request has blocks for all the tokens it knew when it was seated, so only growth by decoding can
    run out of blocks. Then the request ranked last by policy is preempted, but never the oldest: alone it
    always fits, so it goes on until it ends.

    Blocks are scrubbed when a request that held them may have left non-finite values there: it failed, or it
    left before a good row was drawn from all it had computed. A NaN spoils a weighted sum at weight zero too.
    """

    def __init__(
        self,
        max_num_seqs: int,
        kv: PagedKvManager,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
    ) -> None:
        assert kv.max_num_seqs >= max_num_seqs, "every running request needs a row of block tables"
        self.kv = kv
        self.sampling = SamplingTable(kv.max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self._policy = policy
        self._clock = clock
        self._running: dict[str, Request] = {}  # least recently served first when not all fit a step
        self._unproven: set[str] = set()  # hold KV that no good row has been drawn from
        self._scrub_blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Request]:
        """The running requests, least recently served first when they take turns."""
        return iter(self._running.values())

    def get(self, request_id: str) -> Request | None:
        """The running request of this id."""
        return self._running.get(request_id)

    # Sitting down and getting up.

    def can_take(self, request: Request) -> bool:
        """True if a waiting request can be seated now.

        Beside its own blocks it must leave one for each running request, so that all of them can go on for a
        block's worth of steps before anybody has to be preempted.
        """
        if len(self._running) >= self._max_num_seqs:
            return False
        needed = self.kv.blocks_for(len(request.token_ids)) + len(self._running)
        return needed <= self.kv.num_free_blocks

    def take(self, request: Request) -> None:
        """Seat a request for which `can_take` is true."""
        fits = self.kv.allocate(request.request_id, len(request.token_ids))
        assert fits, f"{request.request_id} was found to fit and does not"
        self._running[request.request_id] = request
        self._unproven.add(request.request_id)
        self.sampling.seat(self.kv.row(request.request_id), request)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()

    def leave(self, request: Request, status: RequestStatus) -> None:
        """Get up, with the status given; row and blocks stay held until `vacate`."""
        del self._running[request.request_id]
        request.status = status

    def vacate(self, request_id: str) -> None:
        """Release the row and the blocks of a request that has left."""
        unproven: tuple[int, ...] = ()
        if request_id in self._unproven:
            self._unproven.remove(request_id)
            unproven = self.kv.block_ids(request_id)
        self.kv.free(request_id)
        ref_count = self.kv.pool.ref_count
        self.scrub(block_id for block_id in unproven if ref_count(block_id) == 0)

    def serve_last(self, requests: Iterable[Request]) -> None:
        """Send these to the back of the line."""
        for request in requests:
            self._running[request.request_id] = self._running.pop(request.request_id)

    # Running out of blocks.

    def make_room(self, decodes: Iterable[Request]) -> list[Request]:
        """Get each decode a slot for its newest token; those preempted for it, maybe some of them."""
        preempted: list[Request] = []
        for request in decodes:
            while request.status is RequestStatus.RUNNING:
                if self.kv.allocate(request.request_id, len(request.token_ids)):
                    break
                victim = self._lowest_ranked()
                self.preempt(victim)
                preempted.append(victim)
        return preempted

    def preempt(self, request: Request) -> None:
        """Take a running request's seat; all its tokens will be computed again. The caller queues it."""
        self.leave(request, RequestStatus.PREEMPTED)
        self.vacate(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def oldest(self) -> Request:
        """The running request that arrived first. Somebody must run."""
        return min(self._running.values(), key=lambda request: request.arrival)

    def _lowest_ranked(self) -> Request:
        """Whom to preempt first: the last by policy, but never the oldest."""
        oldest = self.oldest()
        return max((request for request in self if request is not oldest), key=self._policy.key)

    # Values not to be trusted.

    def prove(self, request_id: str) -> None:
        """A good row was drawn from all the KV this request holds."""
        self._unproven.discard(request_id)

    def doubt(self, request_id: str) -> None:
        """The KV this request holds may be non-finite."""
        self._unproven.add(request_id)

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Zero these blocks before the next pass."""
        self._scrub_blocks += block_ids

    def take_scrub_blocks(self) -> tuple[int, ...]:
        """The blocks to zero before the next pass; the caller sees to it, or gives them back to `scrub`."""
        block_ids = tuple(self._scrub_blocks)
        self._scrub_blocks.clear()
        return block_ids
