"""How many steps a reply will take, by what was served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.metrics.histogram import Histogram
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.reply_steps import ReplySteps
from engine.plan.speculation.spec_stats import SpecStats
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
    lengths: ReplySteps, *numbers: int, tenant: str | None = None, endpoint: str = "/chat"
) -> ReplySteps:
    for number in numbers:
        lengths.observe(reply(number, tenant, endpoint=endpoint))
    return lengths


def test_nothing_is_said_before_enough_were_served() -> None:
    lengths = served(ReplySteps(), *[100] * 31)
    assert lengths.remaining(reply(), 0.5) == 1
    assert 80 <= served(lengths, 100).remaining(reply(), 0.5) <= 120


def test_a_low_share_is_short_and_a_high_one_long() -> None:
    lengths = served(ReplySteps(), *range(1, 201))
    assert 5 <= lengths.remaining(reply(), 0.05) <= 14
    assert 85 <= lengths.remaining(reply(), 0.5) <= 115
    assert 175 <= lengths.remaining(reply(), 0.95) <= 215


def test_what_is_there_already_is_taken_into_account() -> None:
    lengths = served(ReplySteps(), *[10] * 90, *[300] * 10)
    assert lengths.remaining(reply(), 0.5) < 11
    assert lengths.remaining(reply(100), 0.5) >= 140
    assert lengths.remaining(reply(900), 0.5) == 1, "longer than anyone before"


def test_a_crowd_that_is_alike_has_the_counts_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = served(ReplySteps(), *range(1, 201))
    num_read = 0
    quantile = Histogram.quantile

    def counting(histogram: Histogram, share: float) -> float:
        nonlocal num_read
        num_read += 1
        return quantile(histogram, share)

    monkeypatch.setattr(Histogram, "quantile", counting)
    assert len({lengths.remaining(reply(), 0.5) for _ in range(300)}) == 1
    assert num_read <= 2, "of the steps and of the pace"
    before = lengths.remaining(reply(), 0.5)
    assert served(lengths, *[500] * 200).remaining(reply(), 0.5) > before, "what is served since counts"


def test_limits_of_the_request_hold() -> None:
    lengths = served(ReplySteps(), *[100] * 64)
    assert lengths.remaining(reply(max_tokens=20), 0.5) == 20
    fixed = make_request(max_tokens=500)  # nothing can stop it sooner
    assert lengths.remaining(fixed, 0.05) == 500


def test_each_tenant_has_its_own_lengths_once_it_has_enough() -> None:
    lengths = served(ReplySteps(), *[100] * 64)
    served(lengths, *[10] * 31, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.9) > 50
    served(lengths, 10, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.9) < 11


def test_each_endpoint_has_its_own_lengths() -> None:
    lengths = served(ReplySteps(), *[300] * 64)
    served(lengths, *[10] * 32, endpoint="/infill")
    assert lengths.remaining(reply(endpoint="/infill"), 0.5) < 11
    assert lengths.remaining(reply(endpoint="/infill", tenant="a"), 0.5) < 11, "as those of others there"
    assert lengths.remaining(reply(), 0.5) > 250
    assert lengths.remaining(reply(endpoint="/new"), 0.5) > 100, "as any"


def test_nothing_is_concluded_from_the_replies_of_others_when_only_its_own_count() -> None:
    lengths = served(ReplySteps(), *[300] * 64)
    assert lengths.remaining(reply(tenant="a"), 0.05, only_own=True) == 1
    served(lengths, *[200] * 32, tenant="a")
    assert lengths.remaining(reply(tenant="a"), 0.05, only_own=True) > 150


def test_a_tenant_is_not_refused_for_how_long_the_replies_of_others_are() -> None:
    batcher = learned(make_batcher())
    served(batcher.replies, *[100] * 64)
    request = reply(tenant="a")
    request.deadline = 100.0 + 0.5
    assert batcher.can_meet(request)
    served(batcher.replies, *[100] * 64, tenant="a")
    assert not batcher.can_meet(request)


def test_what_was_served_long_ago_counts_less_and_kinds_are_bounded() -> None:
    lengths = served(ReplySteps(), *[1000] * 5000)
    served(lengths, *[10] * 5000)
    assert lengths.remaining(reply(), 0.5) < 11
    for number in range(600):
        served(lengths, 5, tenant=f"t{number}")
    assert len(lengths._by_kind) == 1024
    assert lengths.remaining(reply(tenant="t599"), 0.5) < 11, "one without room is as those of others"


def test_a_deadline_that_ends_by_a_stop_token_is_refused_by_what_was_served() -> None:
    batcher = learned(make_batcher())
    request = reply()
    request.deadline = 100.0 + 0.5
    assert batcher.can_meet(request), "it may stop at once"
    served(batcher.replies, *[100] * 64)
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


def test_replies_of_another_size_of_max_tokens_tell_less_than_those_of_the_same() -> None:
    steps = ReplySteps()
    for _ in range(40):
        steps.observe(reply(64, max_tokens=64))
        steps.observe(reply(200, max_tokens=256))
    assert steps.remaining(reply(max_tokens=256), 0.05) > 150
    assert 50 < steps.remaining(reply(max_tokens=64), 0.05) <= 64


def test_accepted_drafts_make_steps_fewer_and_the_pace_counts_where_a_length_is_known() -> None:
    steps = ReplySteps()
    for _ in range(40):
        request = reply(100)
        request.spec_stats = SpecStats(num_rounds=30, num_committed=80)
        assert request.num_token_steps == 50
        steps.observe(request)
    assert 40 < steps.remaining(reply(), 0.5) < 60
    fixed = make_request(max_tokens=500)
    assert 220 < steps.remaining(fixed, 0.5) < 280
    assert ReplySteps().remaining(fixed, 0.5, pace=5.0) == 100, "by the pace given while none is known"


def test_a_reply_that_its_deadline_cut_off_counts_as_one_of_those_as_long() -> None:
    steps, cut = ReplySteps(), reply(50)
    for _ in range(40):
        steps.observe(reply(10))
        steps.observe(reply(200))
    cut.finish(FinishReason.DEADLINE)
    for _ in range(800):
        steps.observe(cut)
    assert steps.remaining(reply(), 0.5) > 150, "of those beyond 50 steps all came to 200"


LONG: Any = {"num_blocks": 512, "max_model_len": 1024}


def waiting(batcher: ContinuousBatcher, name: str, deadline_s: float) -> Request:
    """A request that may end at any token, 1,000 at most."""
    request = replace(reply(), request_id=name, deadline=100.0 + deadline_s)
    batcher.add(request)
    return request


def test_what_will_probably_be_late_goes_behind_what_can_be_in_time() -> None:
    batcher = learned(make_batcher(**LONG, policy="deadline", max_num_seqs=1))
    served(batcher.replies, *range(10, 110))  # a tenth of a second to a whole one
    late, other = waiting(batcher, "late", 0.5), waiting(batcher, "other", 3.0)
    assert batcher.queue.peek() is late
    assert batcher.hopeless() is None, "it has a chance"
    assert late.is_late
    assert batcher.queue.peek() is other
    assert not other.is_late
    batcher.finish("other", FinishReason.ABORT)
    assert batcher.hopeless() is None
    assert batcher.queue.peek() is late, "it runs where nobody else wants to"


def test_of_late_ones_the_one_with_most_time_goes_first_and_a_new_deadline_is_a_new_chance() -> None:
    batcher = learned(make_batcher(**LONG, policy="deadline", max_num_seqs=1))
    served(batcher.replies, *range(10, 110))
    first, second = waiting(batcher, "first", 0.5), waiting(batcher, "second", 0.6)
    assert batcher.hopeless() is None
    assert batcher.queue.peek() is second
    assert batcher.reprioritize("first", deadline=130.0)
    assert not first.is_late
    assert batcher.queue.peek() is first


def test_other_policies_keep_their_order() -> None:
    batcher = learned(make_batcher(**LONG, policy="fcfs", max_num_seqs=1))
    served(batcher.replies, *range(10, 110))
    late = waiting(batcher, "late", 0.5)
    assert batcher.hopeless() is None
    assert not late.is_late


def test_a_running_request_that_will_miss_its_deadline_ends_when_its_seat_is_wanted() -> None:
    batcher = learned(make_batcher(**LONG, max_num_seqs=1))
    running = replace(make_request("running", max_tokens=500), deadline=102.0)
    batcher.add(running)
    batcher.step()
    for _ in range(32):
        assert batcher.hopeless() is None, "nobody wants its seat"
        batcher._step_id += 1
    batcher.add(make_request("waits", arrival=1))
    found = []
    for _ in range(16):
        found.append(batcher.hopeless())
        batcher._step_id += 1
    assert found.count(running) == 1, "judged once in so many steps"
