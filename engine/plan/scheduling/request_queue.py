"""RequestQueue: the requests that wait, next one first."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.policy import PolicyKey, SchedulingPolicy
from engine.plan.scheduling.rising_heap import RisingHeap


class RequestQueue:
    """Orders waiting requests by policy; in each lane those that have run before come first.

    The lanes of the policy are heaps, and so is their order by their heads, because lanes may overtake one
    another. Every operation is O(log n), amortised. The policy hears of every request that comes and goes. A
    request may be *held* until another has computed what both need: `peek` and `pop` pass over it then.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._lanes: dict[str, RisingHeap[PolicyKey]] = {}  # of request ids; those that are not empty
        self._order: RisingHeap[PolicyKey] = RisingHeap(self._rank)  # of the lanes
        self._waiting: dict[str, Request] = {}
        self._held: dict[str, str] = {}  # by id, with the leader's id; these are in no lane
        self._num_forks: dict[str, int] = {}  # that wait to begin, by what they fork from
        self._held_for: dict[str, list[str]] = {}  # by leader; may name requests that are not held any more

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order."""
        return iter(self._waiting.values())

    def get(self, request_id: str) -> Request | None:
        """The waiting request of this id."""
        return self._waiting.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request; its tokens and status must not change while it waits."""
        assert request.request_id not in self._waiting, f"{request.request_id} waits already"
        self._policy.enqueue(request)
        self._waiting[request.request_id] = request
        self._push(request)
        if request.fork_of is not None and _is_new(request):
            self._count_fork(request.fork_of, 1)

    def peek(self) -> Request | None:
        """The request that `pop` would return; None when all that wait are held."""
        name = self._order.least()
        return None if name is None else self._head(name)

    def pop(self) -> Request:
        """Take the next request out. Raises IndexError when `peek` gives None."""
        request = self.peek()
        if request is None:
            raise IndexError("no request waits")
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> Request | None:
        """Take this request out; None when it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return None
        if self._held.pop(request_id, None) is None:
            self._leave_lane(request)
        if request.fork_of is not None and _is_new(request):
            self._count_fork(request.fork_of, -1)
        self._policy.dequeue(request)
        return request

    def reprioritize(self, request_id: str) -> None:
        """Rank a waiting request again after it has changed. KeyError when it does not wait."""
        request = self._waiting[request_id]
        if request_id not in self._held:
            self._push(request)

    def has_forks_of(self, request_id: str) -> bool:
        """True if a request waits that has not begun and forks from this one."""
        return request_id in self._num_forks

    def _count_fork(self, parent_id: str, change: int) -> None:
        count = self._num_forks.pop(parent_id, 0) + change
        if count:
            self._num_forks[parent_id] = count

    def hold(self, request_id: str, leader: str) -> None:
        """Pass over this waiting request until `unhold(leader)`."""
        self._leave_lane(self._waiting[request_id])
        self._held[request_id] = leader
        self._held_for.setdefault(leader, []).append(request_id)

    def unhold(self, leader: str) -> None:
        """Return the requests that are held for this one to their places."""
        for request_id in self._held_for.pop(leader, ()):
            if self._held.get(request_id) == leader:
                del self._held[request_id]
                self._push(self._waiting[request_id])

    def release(self, request_id: str) -> None:
        """Return a waiting request to its place, whatever it is held for."""
        if self._held.pop(request_id, None) is not None:
            self._push(self._waiting[request_id])

    def held_for(self, request_id: str) -> str | None:
        """The request that this one is held for; None when it is not held."""
        return self._held.get(request_id)

    def ahead_of(self, request: Request) -> list[Request]:
        """The requests that would come out before this one, which may or may not wait here. O(n)."""
        free = (other for other in self if other.request_id not in self._held)
        return [other for other in free if self._comes_before(other, request)]

    def _comes_before(self, other: Request, request: Request) -> bool:
        key, lane = self._policy.key, self._policy.lane
        if lane(other) != lane(request):
            return key(other) < key(request)
        return (_is_new(other), key(other)) < (_is_new(request), key(request))

    def _leave_lane(self, request: Request) -> None:
        name = self._policy.lane(request)
        lane = self._lanes[name]
        lane.drop(request.request_id)
        if lane.least() is None:
            del self._lanes[name]
            self._order.drop(name)

    def _push(self, request: Request) -> None:
        name = self._policy.lane(request)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = RisingHeap(self._rank_in_lane)
        lane.put(request.request_id)
        if lane.least() == request.request_id:  # else the lane stands no better than before
            self._order.put(name)

    def _rank_in_lane(self, request_id: str) -> PolicyKey:
        request = self._waiting[request_id]
        return _is_new(request), *self._policy.rank_in_lane(request)

    def _rank(self, lane: str) -> PolicyKey:
        """How the head of a lane stands now."""
        return self._policy.key(self._head(lane))

    def _head(self, lane: str) -> Request:
        request_id = self._lanes[lane].least()
        assert request_id is not None, "an empty lane is kept"
        return self._waiting[request_id]


def _is_new(request: Request) -> bool:
    return request.status is RequestStatus.WAITING
