"""FaultCounter: counts the hits of every fault point and tells when a fault is due."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

from config import FaultPoint, PlannedFault

# Which request the running task prepares, by number: its text is tokenized before it is accepted.
PREPARING: ContextVar[int | None] = ContextVar("preparing", default=None)


class FaultCounter:
    """The planned faults and the hits so far. Any thread may call it.

    A *number* is a request's place among the accepted ones, from 1; None is none that a fault names. All
    choices of a reply are one request. One that is lost to a fault before it is accepted has had its number.
    """

    def __init__(self, faults: Iterable[PlannedFault]) -> None:
        self._faults = tuple(faults)
        self._named = frozenset(fault.request for fault in self._faults if fault.request is not None)
        self._lock = threading.Lock()
        self._hits: Counter[tuple[FaultPoint, int | None]] = Counter()  # None: of all requests together
        self._numbers: dict[str, int] = {}  # by request id, of the requests that a fault names
        self._newest_group = ""
        self.num_arrivals = 0

    def has(self, *points: FaultPoint) -> bool:
        """True if a fault is planned at any of these points."""
        return any(fault.point in points for fault in self._faults)

    def arrive(self, request_id: str, group: str) -> None:
        """A choice of `group` was accepted; those of one group come one right after another."""
        with self._lock:
            self.num_arrivals, self._newest_group = self.number_for(group), group
            if self.num_arrivals in self._named:
                self._numbers[request_id] = self.num_arrivals

    def lose(self) -> None:
        """A request that would have been accepted next has failed while it was being prepared."""
        with self._lock:
            self.num_arrivals, self._newest_group = self.num_arrivals + 1, ""

    def number_for(self, group: str) -> int:
        """The number that the next choice will have, one of `group`, if it is accepted."""
        return self.num_arrivals + (group != self._newest_group)

    def number_of(self, request_id: str) -> int | None:
        """The number of the request that this is a choice of."""
        return self._numbers.get(request_id)

    def hit(self, point: FaultPoint, number: int | None = None) -> PlannedFault | None:
        """Count a hit, by the request of that number if there is one; the fault that is due, or None.

        Of several that are due it is the one that takes longest.
        """
        return self.hit_by_all(point, (number,))

    def hit_by_all(self, point: FaultPoint, numbers: Sequence[int | None]) -> PlannedFault | None:
        """Count one hit that several requests have together, as a pass over all of them is; see `hit`."""
        with self._lock:
            hits: dict[int | None, int] = {}
            for number in {None, *self._named.intersection(numbers)}:
                self._hits[point, number] += 1
                hits[number] = self._hits[point, number]
        due = [
            fault
            for fault in self._faults
            if fault.point == point and fault.request in hits and fault.comes_at(hits[fault.request])
        ]
        return max(due, key=lambda fault: fault.seconds, default=None)
