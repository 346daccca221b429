"""FaultSearch: finds by bisection which request makes forward passes raise."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from engine.plan.request import Request, RequestStatus


class FaultSearch:
    """The groups of a failed pass's requests that are still to be tried, one a pass; none is no search.

    A group that fails is halved, the larger groups go first, and a request that fails alone is to blame. One
    among n costs 2 log2(n) + 1 passes. Where 2 log2(n) + 2 fail in a row, the fault follows no request.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Request]] = deque()
        self._most_failures = 0
        self._num_failed = 0  # in a row

    @property
    def is_active(self) -> bool:
        """True while requests that run are still to be tried."""
        return any(r.status is RequestStatus.RUNNING for r in chain.from_iterable(self._groups))

    def group(self) -> list[Request] | None:
        """The requests that the next step is to try; None allows all. Asked before each step."""
        while self._groups:
            self._groups[0] = [r for r in self._groups[0] if r.status is RequestStatus.RUNNING]
            if self._groups[0]:
                return self._groups[0]
            self._groups.popleft()
        return None

    def skip(self) -> None:
        """The group at hand could not be tried, or did not fail."""
        if self._groups:
            self._groups.popleft()

    def passed(self) -> None:
        """The pass for the group at hand went well."""
        self._num_failed = 0
        self.skip()

    def failed(self, requests: Sequence[Request]) -> list[Request]:
        """The pass for these raised; the ones to blame: none yet, the only one, or all of the search."""
        if self._groups:
            self.skip()
        else:
            self._num_failed, self._most_failures = 0, 2 * len(requests).bit_length()
        self._num_failed += 1
        if len(requests) > 1 and self._num_failed < self._most_failures:
            half = (len(requests) + 1) // 2
            self._groups += (list(requests[:half]), list(requests[half:]))
            return []
        if self._num_failed < self._most_failures:
            return list(requests)
        untried = chain.from_iterable(self._groups)
        blamed = [*requests, *(r for r in untried if r.status is RequestStatus.RUNNING)]
        self._groups.clear()
        return blamed
