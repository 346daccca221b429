"""StateStops: where steps of models with recurrent states end, so that what they leave can be shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request
from engine.plan.scheduling.step_inputs import ScheduledItem
from engine.plan.step_records import StateCopy


@dataclass(slots=True)
class _Course:
    """How far the steps of a request are decided, where its state was last kept, and where it should be."""

    planned: int
    kept: int
    asked: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class StateStops:
    """At which tokens the states of running requests are saved: all counts here are of tokens.

    A state can only be saved where a step ends, which costs a step more, so the stops are few. A prompt is
    computed up to its last whole block, which its next turn begins with, up to each multiple of `period`, and
    up to where another prompt is known to differ, found by its blocks in the cache or beside it in the queue
    (as at the branch points of Marconi, Pan et al. 2024); no stop is closer than `least` to the one before.
    The state of a decode is saved where it happens to be at the end of a block.
    """

    _kv: PagedKvManager
    least: int = 64  # computing fewer again costs no more than the step that would end before them
    period: int = 512
    _courses: dict[str, _Course] = field(default_factory=dict)

    def begin(self, request_id: str, num_found: int, num_known: int) -> None:
        """It is computed behind its first `num_found`; others have computed its first `num_known`."""
        self._courses[request_id] = _Course(num_found, num_found, {num_known})

    def end(self, request_id: str) -> None:
        """The request runs no more."""
        self._courses.pop(request_id, None)

    def ask(self, request_id: str, num_tokens: int) -> None:
        """Have a running request stop behind so many tokens, which another one shares with it."""
        self._courses[request_id].asked.add(num_tokens)

    def gain(self, leader: Request, num_shared: int, num_found: int) -> bool:
        """True if a request that shares so many tokens with this running one had better wait for it.

        That is where the leader's state has been or will be kept well behind what the other one has found.
        """
        course, block_size = self._courses[leader.request_id], self._kv.block_size
        pending = self._kv.snapshots.pending(leader.request_id)
        kept = max((n * block_size for n in pending if n * block_size <= num_shared), default=0)
        if num_shared > course.planned and num_shared - max(kept, num_found) >= self.least:
            self.ask(leader.request_id, num_shared)
            kept = num_shared
        return kept - num_found >= self.least

    def next_stop(self, request: Request) -> int:
        """Where its next chunk is to end at the latest."""
        first, end = request.num_computed_tokens, len(request.token_ids)
        course = self._courses.get(request.request_id)
        if course is None or not self._kv.snapshots.num_slots:
            return end
        block_size = self._kv.block_size
        period = max(1, self.period // block_size) * block_size
        stops = {*course.asked, (end - 1) // block_size * block_size, *range(period, end, period)}
        earliest = max(first + 1, course.kept + self.least)
        return min((stop for stop in stops if earliest <= stop < end), default=end)

    def saves(self, items: Iterable[ScheduledItem]) -> tuple[StateCopy, ...]:
        """Note what a step computes; the states to keep behind it, each in a snapshot reserved for it."""
        if not self._kv.snapshots.num_slots:
            return ()
        copies: list[StateCopy] = []
        for item in items:
            slot = self._save(item)
            if slot is not None:
                copies.append(StateCopy(self._kv.row(item.request.request_id), slot))
        return tuple(copies)

    def _save(self, item: ScheduledItem) -> int | None:
        """The snapshot for the state behind the known tokens of this item; None if it is not to be kept."""
        (request_id, first, count, samples, num_drafts), request, *_ = item
        course, end = self._courses.get(request_id), first + count - num_drafts
        if course is None:
            return None
        is_stop = samples or end == self.next_stop(request)
        course.planned = end
        num_blocks, rest = divmod(end, self._kv.block_size)
        if rest or end < self.least or not is_stop or item.is_held_back:
            return None
        is_output = end > request.num_prompt_tokens
        slot = self._kv.snapshots.reserve(request_id, num_blocks, is_output=is_output)
        if slot is not None:
            course.kept = end
        return slot
