"""SchedulingPolicy: who runs before whom, as one key a request."""

from __future__ import annotations

import math

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.fairness import FairnessWeights, VirtualCounters

PolicyKey = tuple[float, ...]


class SchedulingPolicy:
    """Ranks requests: the smaller key runs first, the largest is preempted first.

    Keys are total (they end with `arrival`, which breaks every tie) and take no account of the time. Requests
    of one lane never change their order among one another unless they change themselves: that lets the queue
    keep a heap a lane, which is not sorted again at each step. Lanes may overtake one another at any step, as
    what is done to a waiting request's key, but by changing the request, makes it greater.
    A policy holds at most one state, fed by the hooks below; it has one queue. What is not overridden does
    nothing, and all requests share one lane.
    """

    name: str  # as in `scheduling_policy`
    takes_turns = True  # False: when a step cannot hold all that run, the best ranked go first, always
    ranks_newcomers = True  # False: `key` means something only once the request has been enqueued

    def key(self, request: Request) -> PolicyKey:
        """The request's rank now; it may depend on the request's fields and on the policy's state."""
        raise NotImplementedError

    def lane(self, request: Request) -> str:
        """Within which the order never changes."""
        return ""

    def rank_in_lane(self, request: Request) -> PolicyKey:
        """The order within the lane: that of `key`, by what does not change while the request waits."""
        return self.key(request)

    def enqueue(self, request: Request) -> None:
        """The request starts to wait: it is new, or it was preempted. Comes before `key` is asked."""

    def dequeue(self, request: Request) -> None:
        """The request waits no longer: it runs, or it has ended."""

    def charge(self, request: Request, num_prefill_tokens: int, num_output_tokens: int) -> None:
        """Tokens are about to be computed (from `num_computed_tokens` on), or were committed."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served. Running requests take turns when a step cannot hold them all."""

    name = "fcfs"

    def key(self, request: Request) -> PolicyKey:
        """Arrival order."""
        return (request.arrival,)


class OrcaPolicy(FcfsPolicy):
    """Iteration-level first come, first served, as in Orca (Yu et al., OSDI 2022, algorithm 1).

    Every step selects the oldest requests that fit and batches whatever each of them needs, prompt chunk or
    next token. Nobody overtakes: a request has never had fewer steps than one that arrived after it. That is
    the difference to `fcfs`, where requests take turns and prefill keeps a share of a step that decodes
    could fill. Orca's reservation of KV for all of `max_tokens` is not part of it: blocks grow as needed.
    """

    name = "orca"
    takes_turns = False


class SjfPolicy(SchedulingPolicy):
    """Fewest remaining tokens first, with a bound on overtaking, so that long requests do not starve.

    Time is counted in work: a request's *turn* is all the work, in tokens, that ever arrived up to and with
    it, and its *backlog* what was unfinished then. The key is its turn plus what it may be put off by, which
    grows with its remaining tokens, but never exceeds MAX_PUT_OFF backlogs. A request that arrives later has
    a turn greater by its own work at least, so whoever overtakes arrived within that much work: all
    overtakers together are at most MAX_PUT_OFF backlogs. First come, first served does one backlog before it,
    so one request at a time, nobody waits more than MAX_PUT_OFF + 1 = 10 times as long here as there.
    """

    name = "sjf"
    ranks_newcomers = False

    MAX_PUT_OFF = 9  # backlogs
    PUT_OFF_PER_TOKEN = 8  # below the bound, one token less outranks this much work having arrived before

    def __init__(self) -> None:
        self._arrived = 0
        self._waiting: dict[str, int] = {}
        self._num_waiting_tokens = 0  # the sum of `_waiting`
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
        remaining = request.num_remaining_tokens
        if request.turn_tokens == 0:
            self._arrived += remaining
            request.turn_tokens = self._arrived
            self._dequeued = {name: other for name, other in self._dequeued.items() if not other.is_finished}
            running = sum(other.num_remaining_tokens for other in self._dequeued.values())
            request.backlog_tokens = self._num_waiting_tokens + running
        self._waiting[request.request_id] = remaining
        self._num_waiting_tokens += remaining

    def dequeue(self, request: Request) -> None:
        """Its work is no longer waiting; it may be running."""
        self._num_waiting_tokens -= self._waiting.pop(request.request_id)
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
    everyone, so `now` cancels out of every comparison: the order is that of aging_periods(priority) * aging_s
    + arrival_time, a constant. A request of class p goes before those of a better class q that arrive more
    than (aging_periods(p) - aging_periods(q)) * aging_s after it, at most 113 periods: nobody starves.
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
    """Earliest deadline first; those without one come last, by arrival.

    Meeting deadlines under overload needs hopeless requests out of the way: admission refuses them
    (`ContinuousBatcher.can_meet`), and those that expire are ended. Requests without a deadline have no claim
    against those with one: they may wait as long as such keep coming.
    """

    name = "deadline"

    def key(self, request: Request) -> PolicyKey:
        """Deadline, then arrival."""
        return (math.inf if request.deadline is None else request.deadline, request.arrival)


class FairPolicy(SchedulingPolicy):
    """The tenant served least goes first; within a tenant it is `priority`.

    Served is counted by VirtualCounters, which also says how far two tenants can come apart. A lane is a
    tenant; its requests keep their order while the tenants overtake one another. Among tenants served equally
    the one goes first that began to wait first, so that no priority reaches beyond its own tenant.
    """

    name = "fair"
    ranks_newcomers = False

    def __init__(self, aging_s: float, weights: FairnessWeights) -> None:
        self._within = PriorityPolicy(aging_s)
        self.counters = VirtualCounters(weights)

    def key(self, request: Request) -> PolicyKey:
        """The tenant's counter and turn, then aged class and arrival."""
        tenant = request.tenant or ""
        return (self.counters.of(tenant), self.counters.turn_of(tenant), *self._within.key(request))

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


def make_policy(name: str, aging_s: float, weights: FairnessWeights | None = None) -> SchedulingPolicy:
    """A new policy of this name, for one queue; StartRefused if there is none.

    `aging_s` is `priority_aging_seconds`; `weights` are what `fair` counts by, the usual ones if None.
    """
    policies = (
        FcfsPolicy(),
        SjfPolicy(),
        PriorityPolicy(aging_s),
        DeadlinePolicy(),
        OrcaPolicy(),
        FairPolicy(aging_s, weights or FairnessWeights()),
    )
    for policy in policies:
        if policy.name == name:
            return policy
    names = ", ".join(policy.name for policy in policies)
    raise StartRefused(f"scheduling-policy {name!r} is not available: choose one of {names}")
