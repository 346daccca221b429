"""Who gives way in a full queue: tenants over their share first, then what is less urgent of one's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.errors import Overloaded
from engine.plan.admission import Admission
from engine.plan.request import Request, RequestStatus
from tests.support.factories import make_request


class Gate:
    """An Admission over a plain list; a reply is the requests of one name before a dot."""

    def __init__(self, places: int, tokens: int = 1000, **weights: float) -> None:
        self.waiting: list[Request] = []
        self.displaced: list[str] = []
        self.num_made = 0
        self.admission = Admission(
            *(places, tokens, lambda num_queued: num_queued),
            weights=weights,
            reply_of=self._reply_of,
            displace=self._displace,
        )

    def _reply_of(self, request: Request) -> Sequence[Request]:
        name = request.request_id.split(".")[0]
        reply = [each for each in self.waiting if each.request_id.split(".")[0] == name]
        return reply if all(each.status is RequestStatus.WAITING for each in reply) else ()

    def _displace(self, request: Request, error: Overloaded) -> None:
        assert error.code == "queue_full" and error.retry_after_s >= len(self.waiting)
        self.waiting.remove(request)
        self.displaced.append(request.request_id)

    def add(self, tenant: str, priority: int = 0, name: str = "") -> str:
        """One request comes, if it is let in."""
        request = make_request(name or f"{tenant}{self.num_made}", arrival=self.num_made, priority=priority)
        request.tenant = tenant
        with self.admission.admit(1, self.waiting, tenant, priority):
            self.waiting.append(request)
        self.num_made += 1
        return request.request_id

    def count(self, tenant: str) -> int:
        return sum(request.tenant == tenant for request in self.waiting)


def test_a_flood_leaves_another_its_share_and_gives_way_newest_first() -> None:
    gate = Gate(8)
    names = [gate.add("flood") for _ in range(8)]
    for _ in range(4):
        gate.add("other")
    assert gate.displaced == names[:3:-1]
    for tenant in ("flood", "other"):
        with pytest.raises(Overloaded, match="8 requests wait, the limit is 8"):
            gate.add(tenant)
    assert (gate.count("flood"), gate.count("other")) == (4, 4)


def test_what_is_least_urgent_gives_way_first() -> None:
    gate = Gate(4)
    names = [gate.add("flood", priority) for priority in (5, 0, 7, 0)]
    gate.add("other")
    gate.add("other")
    assert gate.displaced == [names[2], names[0]]


def test_weights_make_the_shares() -> None:
    gate = Gate(8, heavy=3.0)
    for _ in range(8):
        gate.add("flood")
    for _ in range(6):
        gate.add("heavy")
    with pytest.raises(Overloaded):
        gate.add("heavy")
    assert gate.count("flood") == 2


def test_who_has_most_over_its_share_gives_way() -> None:
    gate = Gate(9)
    for _ in range(6):
        gate.add("flood")
    for _ in range(3):
        gate.add("small")
    for _ in range(3):
        gate.add("new")
    assert [gate.count(name) for name in ("flood", "small", "new")] == [3, 3, 3]


def test_a_better_class_displaces_a_worse_one_of_its_own_tenant_only() -> None:
    gate = Gate(4)
    for tenant, priority in (("a", 3), ("a", 1), ("b", 9), ("b", 9)):
        gate.add(tenant, priority)
    gate.add("a", priority=0)
    assert gate.displaced == ["a0"]
    with pytest.raises(Overloaded):
        gate.add("a", priority=1)
    assert gate.displaced == ["a0"]


def test_what_has_started_does_not_give_way() -> None:
    gate = Gate(2)
    for _ in range(2):
        gate.add("flood")
    for request in gate.waiting:
        request.status = RequestStatus.PREEMPTED
    with pytest.raises(Overloaded):
        gate.add("other")


def test_the_choices_of_a_reply_give_way_together_or_not_at_all() -> None:
    gate = Gate(4)
    for name in ("x.0", "x.1", "y.0", "y.1"):
        gate.add("flood", name=name)
    gate.waiting[3].status = RequestStatus.PREEMPTED
    gate.add("other")
    assert sorted(gate.displaced) == ["x.0", "x.1"]


def test_nobody_gives_way_for_what_would_not_fit_all_the_same() -> None:
    gate = Gate(4)
    for _ in range(4):
        gate.add("flood")
    with pytest.raises(Overloaded):
        gate.admission.admit(3, gate.waiting, "other")
    assert not gate.displaced


def test_places_being_prepared_are_counted_and_not_taken() -> None:
    gate = Gate(4)
    with gate.admission.admit(4, gate.waiting, "flood"), pytest.raises(Overloaded):
        gate.add("other")
    gate.add("other")


def test_tokens_are_shared_as_places_are() -> None:
    gate = Gate(100, tokens=40)
    for _ in range(10):
        gate.add("flood")  # 4 tokens each
    queue = Tokens(gate.waiting)
    mine = make_request("m", 8, arrival=99)
    mine.tenant = "other"
    gate.admission.check_tokens([mine], queue)
    assert gate.displaced == ["flood9", "flood8"] and queue.num_tokens == 32
    mine = make_request("m", 24, arrival=99)
    mine.tenant = "other"
    with pytest.raises(Overloaded, match="32 prompt tokens wait, the limit is 40"):
        gate.admission.check_tokens([mine], queue)


class Tokens(list[Request]):
    """A queue that counts its tokens; the list itself, not a copy."""

    def __init__(self, waiting: list[Request]) -> None:
        self.waiting = waiting

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.waiting)

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.waiting)


def test_twenty_times_the_flood_takes_nothing_of_anothers_share() -> None:
    """Arrivals 20 to 1, the first in the queue served: the other one is always let in up to its half."""
    draw, gate, refused = random.Random(3), Gate(32), 0
    for _ in range(4000):
        tenant = "other" if draw.random() < 1 / 21 else "flood"
        had = gate.count("other")
        try:
            gate.add(tenant)
        except Overloaded:
            refused += tenant == "other" and had < 16
        assert gate.count("other") >= min(had, 16)
        if draw.random() < 0.05:
            gate.waiting.pop(0)
    assert refused == 0
