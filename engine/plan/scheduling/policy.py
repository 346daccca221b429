"""SchedulingPolicy: which request runs before which, as one key a request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.rising_heap import RisingHeap

PolicyKey = tuple[float, ...]


class SchedulingPolicy:
    """Ranks requests: the smaller key runs first, the largest is preempted first.

    Keys end with `arrival`, which breaks every tie, and do not depend on the time. Requests of one lane keep
    their order unless they change themselves, so the queue needs one heap a lane; lanes may overtake one
    another, but the key of a waiting request only rises. A policy serves one queue; its hooks feed its state.
    """

    name: str  # as in `scheduling_policy`
    takes_turns = True  # False: when a step cannot hold all that run, the best ranked go first, always
    ranks_deadlines = False  # True: a request that will probably miss its own is put behind the others
    ranks_newcomers = True  # False: `key` means something only once the request has been enqueued

    def key(self, request: Request) -> PolicyKey:
        """The request's rank now, by its fields and the policy's state."""
        raise NotImplementedError

    def lane(self, request: Request) -> str:
        """The lane that the request waits in."""
        return ""

    def rank_in_lane(self, request: Request) -> PolicyKey:
        """The order of `key` within the lane, by what does not change while the request waits."""
        return self.key(request)

    def enqueue(self, request: Request) -> None:
        """The request starts to wait, new or preempted. Comes before `key` is asked."""

    def dequeue(self, request: Request) -> None:
        """The request waits no longer: it runs, or it has ended."""

    def charge(self, request: Request, num_prefill_tokens: int, num_output_tokens: int) -> None:
        """Tokens are about to be computed (from `num_computed_tokens` on), or were committed."""

    def lane_to_yield(self, waiting: Request, running: Iterable[Request]) -> str | None:
        """The lane of which a running request gives way to this waiting one; None if none has to."""
        return None


class FcfsPolicy(SchedulingPolicy):
    """First come, first served. Running requests take turns when a step cannot hold them all."""

    name = "fcfs"

    def key(self, request: Request) -> PolicyKey:
        """Arrival order."""
        return (request.arrival,)


class OrcaPolicy(FcfsPolicy):
    """Iteration-level first come, first served, as in Orca (Yu et al., OSDI 2022, algorithm 1).

    Every step batches what the oldest requests that fit need: no request has fewer steps than a later one.
    Under `fcfs` they take turns, and prefill keeps a share of the step. Unlike Orca, blocks grow as needed.
    """

    name = "orca"
    takes_turns = False


class SjfPolicy(SchedulingPolicy):
    """Fewest remaining tokens first, with a bound on overtaking, so that long requests do not starve.

    Time is counted in work: a request's *turn* is all the work, in tokens, that arrived up to and with it,
    and its *backlog* what was unfinished then. The key is its turn plus what it may be put off by, which
    grows with its remaining tokens up to MAX_PUT_OFF backlogs. A later request has a turn greater by its own
    work at least, so those that overtake are at most MAX_PUT_OFF backlogs together; fcfs has one before it.
    """

    name = "sjf"
    ranks_newcomers = False

    MAX_PUT_OFF = 9  # backlogs
    PUT_OFF_PER_TOKEN = 8  # below the bound, one token less outranks this much work having arrived before

    def __init__(self) -> None:
        self._arrived = 0
        self._num_waiting_tokens = 0  # that remain to the requests that wait
        self._dequeued: dict[str, Request] = {}  # those that run, and some that have ended

    def key(self, request: Request) -> PolicyKey:
        """The turn up to which others may overtake, then arrival."""
        put_off = min(
            self.PUT_OFF_PER_TOKEN * request.num_remaining_tokens, self.MAX_PUT_OFF * request.backlog_tokens
        )
        return (request.turn_tokens + put_off, request.arrival)

    def enqueue(self, request: Request) -> None:
        """Note a new request's turn and backlog; a preempted one keeps its own. O(running)."""
        self._dequeued.pop(request.request_id, None)
        if request.turn_tokens == 0:
            self._arrived += request.num_remaining_tokens
            request.turn_tokens = self._arrived
            self._dequeued = {name: other for name, other in self._dequeued.items() if not other.is_finished}
            running = sum(other.num_remaining_tokens for other in self._dequeued.values())
            request.backlog_tokens = self._num_waiting_tokens + running
        self._num_waiting_tokens += request.num_remaining_tokens

    def dequeue(self, request: Request) -> None:
        """Its work is no longer waiting; it may be running."""
        self._num_waiting_tokens -= request.num_remaining_tokens
        self._dequeued[request.request_id] = request


_FULL_STEPS = 10  # classes each side of the default, as far as the service tiers reach


def aging_periods(priority: int) -> float:
    """How many aging periods a request of this class is put off by; less than none for the better classes.

    Up to 10 from the default each class is worth one period. Beyond, a step is worth 10 over its distance, so
    that the whole scale is worth 112.1 periods, not 2,000.
    """
    distance = abs(priority)
    if distance > _FULL_STEPS:
        return math.copysign(_FULL_STEPS * (1 + math.log(distance / _FULL_STEPS)), priority)
    return float(priority)


class PriorityPolicy(SchedulingPolicy):
    """By class, then by arrival; each `aging_s` seconds since arrival count as one period (0: never).

    The effective class, aging_periods(priority) - (now - arrival_time) / aging_s, falls at the same speed for
    all requests, so their order is that of a constant, aging_periods(priority) * aging_s + arrival_time. None
    starves: one of class p goes before those of a better class q that arrive more than (aging_periods(p) -
    aging_periods(q)) * aging_s after it, at most 113 periods.
    """

    name = "priority"

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def key(self, request: Request) -> PolicyKey:
        """Aged class, then arrival; the plain class without aging."""
        if self._aging_s == 0:
            return (request.priority, request.arrival)
        return (aging_periods(request.priority) * self._aging_s + request.arrival_time, request.arrival)


class DeadlinePolicy(SchedulingPolicy):
    """Earliest deadline first; requests without one come last, by arrival, and may wait indefinitely.

    Admission refuses hopeless requests (`ContinuousBatcher.can_meet`), and those that expire are ended. Late
    ones, which will probably miss their deadlines, go behind all that can meet theirs, those with most time
    left first: above capacity the earliest deadlines are mostly of requests that cannot end in time any more,
    and whoever serves those serves nobody (Buttazzo, Spuri and Sensini, Value vs. Deadline Scheduling in
    Overload Conditions, RTSS 1995).
    """

    name = "deadline"
    ranks_deadlines = True

    def key(self, request: Request) -> PolicyKey:
        """Deadline, then arrival; behind those, late ones by the time that they have."""
        if request.deadline is None:
            return (2, request.arrival)
        if request.is_late:
            return (1, -request.deadline, request.arrival)
        return (0, request.deadline, request.arrival)


@dataclass(frozen=True, slots=True)
class FairnessWeights:
    """What a computed prompt token and an output token cost, and each tenant's weight (1 by default).

    A tenant of weight 2 gets twice the service of one of weight 1 while both have work. StartRefused unless
    all are above 0.
    """

    prompt: float = 1.0
    output: float = 2.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {"prompt": self.prompt, "output": self.output, **self.tenants}
        for name, weight in named.items():
            if not weight > 0:
                raise StartRefused(f"The fairness weight of {name!r} is {weight}: it must be above 0.")


class VirtualCounters:
    """The Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    A tenant's counter grows by the weighted tokens computed for it over its weight, each token once, however
    often preemption has it computed. A tenant that comes back is lifted to CREDIT below the least counter of
    the waiting ones (of the last to leave, if none waits): it goes first, so that a client that sends one
    request after another loses no turn in between, and saves up no more than that. `_floor` is where that
    is; it never falls, and tenants that do not wait count as being there at least.

    While two tenants always have requests waiting, their service over any interval differs by at most
    2 * max(w_prompt * L, w_output * M), and CREDIT once, if w_prompt <= w_output: L is the longest prompt and
    M the most tokens that admitted requests may come to hold, without preemption the size of the KV.
    """

    CREDIT = 512.0  # weighted tokens: a short request
    PRUNE_ABOVE = 64  # counters; then once more whenever they have doubled

    def __init__(self, weights: FairnessWeights) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self.turns: dict[str, int] = {}  # when each last began to wait, earlier ones lower
        self._last_turn = 0
        self._order: RisingHeap[float] = RisingHeap(self.of)  # of the tenants that wait
        self._floor = 0.0
        self._last_left: str | None = None
        self._prune_above = self.PRUNE_ABOVE

    @property
    def waiting(self) -> Iterable[str]:
        """The tenants that have a request waiting."""
        return self._num_waiting

    def of(self, tenant: str) -> float:
        """The tenant's counter now."""
        counter = self._counters.get(tenant, self._floor)
        return counter if tenant in self._num_waiting else max(counter, self._floor)

    def join(self, tenant: str) -> None:
        """One more request of this tenant waits. O(log n) of the waiting tenants, amortised."""
        if tenant not in self._num_waiting:
            self._raise_floor()
            self._counters[tenant] = self.of(tenant)
            self._num_waiting[tenant] = 0
            self._last_turn += 1
            self.turns[tenant] = self._last_turn
            self._order.put(tenant)
            self._prune()
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One request of this tenant waits no longer. O(1), amortised."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._order.drop(tenant)
            self._last_left = tenant

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count service for this tenant."""
        cost = self._weights.prompt * num_prompt_tokens + self._weights.output * num_output_tokens
        self._counters[tenant] = self.of(tenant) + cost / self._weights.tenants.get(tenant, 1.0)

    def _raise_floor(self) -> None:
        first = self._order.least()
        if first is not None:
            least = self._counters[first]
        elif self._last_left is not None:
            least = self.of(self._last_left)
        else:
            return
        self._floor = max(self._floor, least - self.CREDIT)

    def _prune(self) -> None:
        """Drop the counters of tenants that come back near enough to the floor, which they then start at."""
        if len(self._counters) <= self._prune_above:
            return
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if tenant in self._num_waiting or counter > self._floor + self.CREDIT
        }
        self.turns = {tenant: turn for tenant, turn in self.turns.items() if tenant in self._counters}
        self._prune_above = max(self.PRUNE_ABOVE, 2 * len(self._counters))


class FairPolicy(SchedulingPolicy):
    """The tenant served least, by VirtualCounters, goes first; within a tenant, a lane, it is `priority`.

    Among tenants served equally it is the one that began to wait first: a priority is its own tenant's only.
    """

    name = "fair"
    ranks_newcomers = False

    def __init__(self, aging_s: float, weights: FairnessWeights) -> None:
        self._within = PriorityPolicy(aging_s)
        self._weights = weights.tenants
        self.counters = VirtualCounters(weights)

    def key(self, request: Request) -> PolicyKey:
        """The tenant's counter and turn, then aged class and arrival."""
        tenant = request.tenant or ""
        return (self.counters.of(tenant), self.counters.turns.get(tenant, 0), *self._within.key(request))

    def lane(self, request: Request) -> str:
        """The tenant; the anonymous one is the empty name."""
        return request.tenant or ""

    def rank_in_lane(self, request: Request) -> PolicyKey:
        """Aged class, then arrival."""
        return self._within.key(request)

    def enqueue(self, request: Request) -> None:
        """Its tenant has one more waiting."""
        self.counters.join(request.tenant or "")

    def dequeue(self, request: Request) -> None:
        """Its tenant has one less waiting."""
        self.counters.leave(request.tenant or "")

    def charge(self, request: Request, num_prefill_tokens: int, num_output_tokens: int) -> None:
        """Count each prompt token when it is first to be computed, each output token when it is committed."""
        first = max(request.num_computed_tokens, request.num_charged_tokens)
        end = min(request.num_computed_tokens + num_prefill_tokens, request.num_prompt_tokens)
        num_prompt_tokens = max(0, end - first)
        request.num_charged_tokens = max(request.num_charged_tokens, end)
        self.counters.charge(request.tenant or "", num_prompt_tokens, num_output_tokens)

    def lane_to_yield(self, waiting: Request, running: Iterable[Request]) -> str | None:
        """The tenant with most beyond its share of what runs, for one with less. A share is one at least.

        A seat moves only from above a share to below one, so it does not move back. O(running + tenants).
        """
        held = Counter(map(self.lane, running))
        weights = {name: self._weights.get(name, 1.0) for name in {*held, *self.counters.waiting}}
        a_weight = held.total() / sum(weights.values())
        mine = self.lane(waiting)
        if not held or held[mine] + 1 > max(1.0, a_weight * weights[mine]):
            return None
        most = max(held, key=lambda name: held[name] / weights[name])
        return most if held[most] > max(1.0, a_weight * weights[most]) else None


def make_policy(name: str, aging_s: float, weights: FairnessWeights | None = None) -> SchedulingPolicy:
    """A new policy of this name, for one queue; `weights` are for `fair`. StartRefused if there is none."""
    fair = FairPolicy(aging_s, weights or FairnessWeights())
    policies = (FcfsPolicy(), SjfPolicy(), PriorityPolicy(aging_s), DeadlinePolicy(), OrcaPolicy(), fair)
    by_name: dict[str, SchedulingPolicy] = {policy.name: policy for policy in policies}
    if name not in by_name:
        names = ", ".join(by_name)
        raise StartRefused(f"scheduling-policy {name!r} is not available: choose one of {names}")
    return by_name[name]
