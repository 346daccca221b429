"""SchedulingPolicy: who runs before whom, as one key a request."""

from __future__ import annotations

from typing import Protocol

from engine.errors import StartRefused
from engine.request import Request

PolicyKey = tuple[float, ...]


class SchedulingPolicy(Protocol):
    """Ranks requests: the smaller key runs first, the largest is preempted first.

    Keys are total (they end with `arrival`, which breaks every tie) and take no account of the time: between
    two requests that do not change, the order never changes. That is what lets the queue be a heap, which is
    not sorted again at each step. A policy holds at most one state object.
    """

    def key(self, request: Request) -> PolicyKey:
        """The request's rank now; it may depend on the request's fields and on the policy's state."""
        ...


class FcfsPolicy:
    """First come, first served."""

    def key(self, request: Request) -> PolicyKey:
        """Arrival order."""
        return (request.arrival,)


class PriorityPolicy:
    """By class, then by arrival; each `aging_s` seconds since arrival count as one class (0: never).

    The effective class, priority - (now - arrival_time) / aging_s, falls at the same speed for everyone, so
    `now` cancels out of every comparison: the order is that of priority * aging_s + arrival_time, a constant.
    A request of class p goes before those of a better class q that arrive more than (p - q) * aging_s after
    it, so nobody starves.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def key(self, request: Request) -> PolicyKey:
        """Aged class, then arrival; the plain class without aging."""
        if self._aging_s == 0:
            return (request.priority, request.arrival)
        return (request.priority * self._aging_s + request.arrival_time, request.arrival)


def make_policy(name: str, aging_s: float) -> SchedulingPolicy:
    """The policy of this name; `aging_s` is `priority_aging_seconds`. StartRefused if there is none."""
    if name == "fcfs":
        return FcfsPolicy()
    if name == "priority":
        return PriorityPolicy(aging_s)
    raise StartRefused(f"scheduling-policy {name!r} is not available: choose fcfs or priority")
