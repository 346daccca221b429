"""What is read ahead: in short steps, only while nothing else is to be done, and found by the next prompt."""

from __future__ import annotations

from engine.plan.request import MAX_PRIORITY, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import FakeRunner, expected_output

NEXT = list(range(100, 250))  # 37 blocks of 4 and two tokens


def make() -> tuple[ContinuousBatcher, FakeRunner]:
    batcher = make_batcher(prefix_caching=True, num_blocks=128, max_model_len=256, max_num_batched_tokens=256)
    return batcher, make_runner(batcher)


def run_all(batcher: ContinuousBatcher, runner: FakeRunner) -> list[int]:
    """Step until nothing is left, reading ahead when idle; how many tokens each step had."""
    sizes = []
    while batcher.has_work or batcher.read_ahead():
        decision, _ = run_step(batcher, runner)
        sizes.append(decision.num_tokens)
        batcher.kv.check_integrity()
    assert batcher.kv.num_used_blocks == 0
    return sizes


def test_a_prompt_to_come_is_computed_in_slices_and_the_prompt_begins_behind_it() -> None:
    batcher, runner = make()
    batcher.next_turns.expect(NEXT, None)
    assert run_all(batcher, runner) == [64, 64, 20]
    request = make_request("a", [*NEXT, 3, 4], arrival=1)
    batcher.add(request)
    assert shape_of(run_step(batcher, runner)[0]) == [("a", 148, 4, True)]
    run_all(batcher, runner)
    assert request.output_token_ids == expected_output(request.token_ids[:152], 8)
    assert (batcher.next_turns.num_used, batcher.next_turns.num_unused) == (148, 0)


def test_whoever_comes_waits_for_one_slice_at_most() -> None:
    batcher, runner = make()
    batcher.next_turns.expect(NEXT, None)
    assert batcher.read_ahead()
    batcher.add(make_request("a", 8, arrival=1, max_tokens=3))
    decision, _ = run_step(batcher, runner)
    assert [entry.request_id for entry in decision.scheduled] == ["a", "next-turn-1"]
    while batcher.has_work:
        assert [entry.request_id for entry in run_step(batcher, runner)[0].scheduled] == ["a"]
    assert batcher.read_ahead(), "and goes on when it is idle again"


def test_slices_are_as_long_as_the_machine_computes_in_a_moment() -> None:
    batcher, _ = make()
    batcher.rates.seed([(0, 1, 0.001), (256, 0, 0.0522)])  # 0.2 ms a token
    batcher.next_turns.expect(NEXT, None)
    request = batcher.next_turns.next_slice(0.0)
    assert request is not None
    assert 80 <= request.num_tokens <= 104
    assert request.priority == MAX_PRIORITY - 1, "the worst but one: those of batches are computed slowly"


def test_what_is_cached_is_not_computed_again() -> None:
    batcher, runner = make()
    batcher.add(make_request("a", NEXT, max_tokens=1))
    run_all(batcher, runner)
    batcher.next_turns.expect(NEXT, None)
    assert not batcher.read_ahead()
    batcher.next_turns.expect([*NEXT, *range(10)], None)
    assert run_all(batcher, runner) == [12]


def test_salts_are_kept_apart() -> None:
    batcher, runner = make()
    batcher.next_turns.expect(NEXT, "a")
    run_all(batcher, runner)
    request = make_request("b", NEXT, arrival=1, max_tokens=1, cache_salt="b")
    batcher.add(request)
    run_all(batcher, runner)
    assert request.num_cached_tokens == 0
    assert batcher.next_turns.num_used == 0


def test_what_leaves_the_cache_first_counts_as_unused() -> None:
    batcher, runner = make()
    batcher.next_turns.expect(NEXT, None)
    run_all(batcher, runner)
    batcher.kv.prefixes.reset()
    assert not batcher.read_ahead()
    assert (batcher.next_turns.num_used, batcher.next_turns.num_unused) == (0, 148)


def test_a_slice_that_fails_is_not_tried_for_ever() -> None:
    batcher, _ = make()
    batcher.next_turns.expect(NEXT, None)
    requests: list[Request] = []
    while batcher.read_ahead():
        decision = batcher.step()
        requests += batcher.isolate(decision)
    assert len(requests) == 1


def test_many_chats_and_long_prompts_are_bounded() -> None:
    batcher, runner = make()
    for first in range(200):
        batcher.next_turns.expect([first] * 8, None)
    batcher.next_turns.expect(list(range(5000)), None)
    sizes = run_all(batcher, runner)
    assert len(sizes) <= 64 + 256 // 64
    assert sum(sizes) < 256 + 64 * 8


def test_slices_tell_nothing_of_how_long_replies_are() -> None:
    batcher, runner = make()
    for first in range(50):
        batcher.next_turns.expect([first] * 8, None)
    assert len(run_all(batcher, runner)) == 50
    served = make_request(stop_token_ids=frozenset([1]), max_tokens=1000)
    served.token_ids += [7] * 100
    for _ in range(32):
        batcher.replies.observe(served)
    newcomer = make_request(stop_token_ids=frozenset([1]), max_tokens=1000)
    assert batcher.replies.remaining(newcomer, 0.05) > 50
