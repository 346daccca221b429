"""How long a reply will be, by what was served."""

from __future__ import annotations

from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.output_lengths import OutputLengths
from tests.support.factories import make_batcher, make_request
from tests.unit.plan.scheduling.test_live_requests import learned

EOS = frozenset([1])


def reply(
    num_tokens: int = 0, tenant: str | None = None, max_tokens: int = 1000, endpoint: str = "/chat"
) -> Request:
    request = make_request(stop_token_ids=EOS, max_tokens=max_tokens)
    request.tenant, request.endpoint = tenant, endpoint
    request.token_ids += [7] * num_tokens
    return request


def served(
    lengths: OutputLengths, *numbers: int, tenant: str | None = None, endpoint: str = "/chat"
) -> OutputLengths:
    for number in numbers:
        lengths.observe(reply(number, tenant, endpoint=endpoint))
    return lengths


def test_nothing_is_said_before_enough_were_served() -> None:
    lengths = served(OutputLengths(), *[100] * 31)
    assert lengths.remaining(reply(), 0.5) == 1
    assert 80 <= served(lengths, 100).remaining(reply(), 0.5) <= 120


def test_a_low_share_is_short_and_a_high_one_long() -> None:
    lengths = served(OutputLengths(), *range(1, 201))
    assert 5 <= lengths.remaining(reply(), 0.05) <= 14
    assert 85 <= lengths.remaining(reply(), 0.5) <= 115
    assert 175 <= lengths.remaining(reply(), 0.95) <= 215


def test_what_is_there_already_is_taken_into_account() -> None:
    lengths = served(OutputLengths(), *[10] * 90, *[300] * 10)
    assert lengths.remaining(reply(), 0.5) <= 10
    assert lengths.remaining(reply(100), 0.5) >= 140
    assert lengths.remaining(reply(900), 0.5) == 1, "longer than anyone before"


def test_limits_of_the_request_hold() -> None:
    lengths = served(OutputLengths(), *[100] * 64)
    assert lengths.remaining(reply(max_tokens=20), 0.5) == 20
    fixed = make_request(max_tokens=500)  # nothing can stop it sooner
    assert lengths.remaining(fixed, 0.05) == 500


def test_each_tenant_has_its_own_lengths_once_it_has_enough() -> None:
    lengths = served(OutputLengths(), *[100] * 64)
    served(lengths, *[10] * 31, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.9) > 50
    served(lengths, 10, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.9) <= 10


def test_each_endpoint_has_its_own_lengths() -> None:
    lengths = served(OutputLengths(), *[300] * 64)
    served(lengths, *[10] * 32, endpoint="/infill")
    assert lengths.remaining(reply(endpoint="/infill"), 0.5) <= 10
    assert lengths.remaining(reply(endpoint="/infill", tenant="a"), 0.5) <= 10, "as those of others there"
    assert lengths.remaining(reply(), 0.5) > 250
    assert lengths.remaining(reply(endpoint="/new"), 0.5) > 100, "as any"


def test_nothing_is_concluded_from_the_replies_of_others_when_only_its_own_count() -> None:
    lengths = served(OutputLengths(), *[300] * 64)
    assert lengths.remaining(reply(tenant="a"), 0.05, only_own=True) == 1
    served(lengths, *[200] * 32, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.05, only_own=True) > 150


def test_a_tenant_is_not_refused_for_how_long_the_replies_of_others_are() -> None:
    batcher = learned(make_batcher())
    served(batcher.lengths, *[100] * 64)
    request = reply(tenant="a")
    request.deadline = 100.0 + 0.5
    assert batcher.can_meet(request)
    served(batcher.lengths, *[100] * 64, tenant="a")
    assert not batcher.can_meet(request)


def test_what_was_served_long_ago_counts_less_and_kinds_are_bounded() -> None:
    lengths = served(OutputLengths(), *[1000] * 5000)
    served(lengths, *[10] * 5000)
    assert lengths.remaining(reply(), 0.5) <= 10
    for number in range(600):
        served(lengths, 5, tenant=f"t{number}")
    assert len(lengths._by_kind) == 512
    assert lengths.remaining(reply(tenant="t599"), 0.5) <= 10, "one without room is as those of others"


def test_a_deadline_that_ends_by_a_stop_token_is_refused_by_what_was_served() -> None:
    batcher = learned(make_batcher())
    request = reply()
    request.deadline = 100.0 + 0.5
    assert batcher.can_meet(request), "it may stop at once"
    served(batcher.lengths, *[100] * 64)
    assert not batcher.can_meet(request), "a hundred steps take a second"
    needed_s = batcher.completion_s(request)
    assert needed_s is not None and 0.9 < needed_s < 1.3
    request.deadline = 102.0
    assert batcher.can_meet(request)


def test_what_has_waited_too_long_is_found_before_it_runs() -> None:
    batcher = learned(make_batcher(max_num_seqs=1))
    first, late = make_request("a", arrival=0, max_tokens=2), make_request("b", arrival=1, max_tokens=40)
    late.deadline = 100.1
    batcher.add(first)
    assert batcher.hopeless() is None
    batcher.step()
    batcher.add(late)
    assert batcher.hopeless() is None, "it has no seat yet"
    batcher.finish("a", FinishReason.ABORT)
    assert batcher.hopeless() is late
