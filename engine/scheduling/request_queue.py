"""RequestQueue: the requests that wait, next one first."""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

from engine.request import Request, RequestStatus
from engine.scheduling.policy import PolicyKey, SchedulingPolicy


class _Entry(NamedTuple):
    """A place in the heap; `serial` makes places comparable without comparing requests."""

    is_new: bool  # False for preempted work, which goes first
    key: PolicyKey
    serial: int
    request: Request


class RequestQueue:
    """Orders waiting requests: preempted ones first, each group by policy.

    Every operation is O(log n), amortised. A removed or re-ranked request leaves a dead place in the heap;
    when more places are dead than alive the heap is built anew.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._serials = count()
        self.num_tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, request: Request) -> None:
        """Queue a request, by its status WAITING or PREEMPTED; its tokens must not change while it waits."""
        assert request.request_id not in self._live, f"{request.request_id} waits already"
        self._push(request)
        self.num_tokens += len(request.token_ids)

    def peek(self) -> Request | None:
        """The request that `pop` would return; None when nobody waits."""
        heap, live = self._heap, self._live
        while heap and live.get(heap[0].request.request_id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0].request if heap else None

    def pop(self) -> Request:
        """Take the next request out. Raises IndexError when nobody waits."""
        request = self.peek()
        if request is None:
            raise IndexError("nobody waits")
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> Request | None:
        """Take this request out, wherever it stands; None when it does not wait."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return None
        self.num_tokens -= len(entry.request.token_ids)
        self._compact()
        return entry.request

    def reprioritize(self, request_id: str) -> None:
        """Rank a waiting request again after its priority has changed. KeyError when it does not wait."""
        self._push(self._live[request_id].request)
        self._compact()

    def _push(self, request: Request) -> None:
        is_new = request.status is not RequestStatus.PREEMPTED
        entry = _Entry(is_new, self._policy.key(request), next(self._serials), request)
        self._live[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 8:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
