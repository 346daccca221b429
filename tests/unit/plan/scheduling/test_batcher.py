"""What a step schedules, exactly. Requests' ends and failed steps are in test_batcher_endings.py."""

from dataclasses import fields
from typing import Any

import pytest

from engine.errors import StartRefused
from engine.plan.request import MAX_PRIORITY, FinishReason, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.step_planner import BatchConfig
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import FakeRunner, ManualClock, expected_output


def start_decoding(batcher: ContinuousBatcher, num_requests: int, prompt: int = 3) -> FakeRunner:
    """Add requests r0, r1, ... and step until each has its first token; the runner used."""
    runner = make_runner(batcher)
    requests = [make_request(f"r{i}", prompt, arrival=i, max_tokens=40, seed=i) for i in range(num_requests)]
    for request in requests:
        batcher.add(request)
    while any(request.num_output_tokens == 0 for request in requests):
        run_step(batcher, runner)
    return runner


def names_of(batcher: ContinuousBatcher, runner: FakeRunner, steps: int) -> list[list[str]]:
    """The ids scheduled in each of the next steps."""
    return [[entry.request_id for entry in run_step(batcher, runner)[0].scheduled] for _ in range(steps)]


def test_an_idle_batcher_decides_nothing() -> None:
    batcher = make_batcher()
    assert not batcher.has_work
    decision = batcher.step()
    assert not decision.scheduled
    assert decision.inputs is None
    assert (decision.num_tokens, decision.step_id) == (0, 1)
    assert batcher.step().step_id == 2, "an empty decision needs no commit"


def test_a_request_goes_from_prompt_to_its_last_token() -> None:
    clock = ManualClock()
    batcher = make_batcher(clock=clock)
    runner = make_runner(batcher)
    request = make_request("a", [1, 2, 3, 4, 5], max_tokens=3)
    batcher.add(request)
    assert (len(batcher.queue), len(batcher.running)) == (1, 0)
    decision, committed = run_step(batcher, runner)
    assert shape_of(decision) == [("a", 0, 5, True)]
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (0, 5)
    assert (len(batcher.queue), len(batcher.running)) == (0, 1)
    assert [(token.request, token.row, token.finish_reason, token.error) for token in committed] == [
        (request, 0, None, None)
    ]
    assert request.num_computed_tokens == 5
    assert request.first_scheduled_time == clock.now
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("a", 5, 1, True)]
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (1, 0)
    run_step(batcher, runner)
    assert request.output_token_ids == expected_output([1, 2, 3, 4, 5], 3)
    assert not batcher.has_work


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    batcher = make_batcher(max_num_batched_tokens=8)
    runner = start_decoding(batcher, 2)
    batcher.add(make_request("long", 15, arrival=9, max_tokens=4))
    shapes = [shape_of(run_step(batcher, runner)[0]) for _ in range(4)]
    assert shapes[0] == [("r0", 3, 1, True), ("r1", 3, 1, True), ("long", 0, 6, False)]
    assert shapes[1][2:] == [("long", 6, 6, False)]
    assert shapes[2][2:] == [("long", 12, 3, True)]
    assert shapes[3][2:] == [("long", 15, 1, True)]


def test_a_chunk_that_samples_nothing_commits_no_token() -> None:
    batcher = make_batcher(max_num_batched_tokens=4)
    runner = make_runner(batcher)
    request = make_request("a", 6)
    batcher.add(request)
    _, committed = run_step(batcher, runner)
    assert committed == []
    assert (request.num_computed_tokens, request.num_output_tokens) == (4, 0)
    assert batcher.kv.block_ids("a") == (0, 1), "all known tokens have their blocks from the start"


def test_chunks_follow_the_policy_across_running_and_waiting() -> None:
    batcher = make_batcher(max_num_batched_tokens=4, policy="priority")
    runner = make_runner(batcher)
    batcher.add(make_request("flex", 10, arrival=0, priority=10))
    run_step(batcher, runner)
    batcher.add(make_request("high", 6, arrival=1, priority=-10))
    batcher.add(make_request("plain", 2, arrival=2))
    shapes = [shape_of(run_step(batcher, runner)[0]) for _ in range(4)]
    assert shapes[0] == [("high", 0, 4, False)]
    assert shapes[1] == [("high", 4, 2, True), ("plain", 0, 2, True)]
    assert shapes[2] == [("high", 6, 1, True), ("plain", 2, 1, True), ("flex", 4, 2, False)]


def test_sequences_of_one_token_come_first() -> None:
    batcher = make_batcher()
    for arrival, prompt in enumerate((3, 1, 2, 1)):
        batcher.add(make_request(f"r{arrival}", prompt, arrival=arrival))
    decision, committed = run_step(batcher, make_runner(batcher))
    assert [entry[0] for entry in shape_of(decision)] == ["r1", "r3", "r0", "r2"]
    assert [(token.request.request_id, token.row) for token in committed] == [
        ("r1", 0),
        ("r3", 1),
        ("r0", 2),
        ("r2", 3),
    ]


def test_max_prefill_tokens_bounds_prefill_but_not_decodes() -> None:
    batcher = make_batcher(max_num_batched_tokens=16, max_prefill_tokens=3)
    runner = start_decoding(batcher, 3)
    batcher.add(make_request("long", 9, arrival=9))
    decision, _ = run_step(batcher, runner)
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (3, 3)


def test_max_num_seqs_bounds_who_runs() -> None:
    batcher = make_batcher(max_num_seqs=2)
    for arrival in range(3):
        batcher.add(make_request(f"r{arrival}", arrival=arrival, max_tokens=2))
    runner = make_runner(batcher)
    assert names_of(batcher, runner, 3) == [["r0", "r1"], ["r0", "r1"], ["r2"]]


def test_decodes_take_turns_when_not_all_may_run() -> None:
    batcher = make_batcher(max_num_seqs=5, max_decode_seqs=2)
    runner = start_decoding(batcher, 5)
    first = names_of(batcher, runner, 5)
    assert all(len(step) == 2 for step in first)
    assert sorted(name for step in first for name in step) == sorted(["r0", "r1", "r2", "r3", "r4"] * 2)


def test_a_budget_smaller_than_the_seats_is_shared_in_turn() -> None:
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=3)
    runner = start_decoding(batcher, 4)
    steps = names_of(batcher, runner, 4)
    assert all(len(step) == 3 for step in steps)
    assert sorted(name for step in steps for name in step) == sorted(["r0", "r1", "r2", "r3"] * 3)


def test_decodes_leave_a_block_for_prefill_when_they_would_fill_the_step() -> None:
    batcher = make_batcher(max_num_seqs=13, max_num_batched_tokens=12, block_size=4, num_blocks=64)
    runner = start_decoding(batcher, 12)
    decision, _ = run_step(batcher, runner)
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (12, 0), "nobody waits"
    batcher.add(make_request("new", 10, arrival=99))
    decision, _ = run_step(batcher, runner)
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (8, 4)
    decision, _ = run_step(batcher, runner)
    assert (decision.num_decode_tokens, decision.num_prefill_tokens) == (8, 4)


def test_nothing_is_reserved_for_a_request_that_cannot_be_seated() -> None:
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=4)
    runner = start_decoding(batcher, 4)
    batcher.add(make_request("new", 10, arrival=99))
    decision, _ = run_step(batcher, runner)
    assert decision.num_decode_tokens == 4


def test_a_budget_of_one_token_goes_by_turns() -> None:
    batcher = make_batcher(max_num_seqs=2, max_num_batched_tokens=1)
    runner = start_decoding(batcher, 1, prompt=1)
    batcher.add(make_request("new", 3, arrival=9))
    assert sorted(names_of(batcher, runner, 4)) == [["new"], ["new"], ["r0"], ["r0"]]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    batcher = make_batcher(num_blocks=16, max_model_len=64)
    runner = start_decoding(batcher, 1, prompt=24)
    batcher.add(make_request("big", 36, arrival=1))
    batcher.add(make_request("small", 1, arrival=2))
    decision, _ = run_step(batcher, runner)
    assert [entry.request_id for entry in decision.scheduled] == ["r0"]
    assert len(batcher.queue) == 2


def test_a_full_cache_preempts_the_newest_which_resumes_first_with_the_right_text() -> None:
    batcher = make_batcher(num_blocks=5, block_size=4, max_model_len=20)
    runner = make_runner(batcher)
    a, b = make_request("a", 7, arrival=0, max_tokens=9), make_request("b", 4, arrival=1, max_tokens=9)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    batcher.add(make_request("c", 2, arrival=2, max_tokens=2))
    preempted, order = [], []
    while batcher.has_work:
        decision, committed = run_step(batcher, runner)
        preempted += list(decision.preempted)
        order += [t.request.request_id for t in committed if t.finish_reason is not None]
        batcher.kv.check_integrity()
    assert preempted == ["b"]
    assert b.num_preemptions == 1
    assert order == ["a", "c", "b"]
    assert a.output_token_ids == expected_output(a.token_ids[:7], 9)
    assert b.output_token_ids == expected_output(b.token_ids[:4], 9)
    assert batcher.kv.pool.num_free == 5


def test_the_preempted_is_not_seated_again_in_the_same_step() -> None:
    batcher = make_batcher(num_blocks=6, block_size=2, max_model_len=12)
    runner = make_runner(batcher)
    batcher.add(make_request("a", 2, arrival=0, max_tokens=10))
    batcher.add(make_request("b", 6, arrival=1, max_tokens=6))
    run_step(batcher, runner)
    batcher.add(make_request("c", 1, arrival=2, max_tokens=1))
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, shape_of(decision)) == ((), [("a", 2, 1, True), ("b", 6, 1, True)])
    run_step(batcher, runner)
    decision, _ = run_step(batcher, runner)
    assert decision.preempted == ("b",)
    assert shape_of(decision) == [("a", 4, 1, True)]
    assert batcher.kv.pool.num_free == 3
    decision, _ = run_step(batcher, runner)
    assert decision.preempted == ()


def test_a_prompt_in_progress_can_be_preempted_and_starts_again() -> None:
    batcher = make_batcher(num_blocks=7, block_size=2, max_model_len=14, max_prefill_tokens=1)
    runner = make_runner(batcher)
    a, b = make_request("a", 1, arrival=0, max_tokens=9), make_request("b", 8, arrival=1, max_tokens=2)
    batcher.add(a)
    run_step(batcher, runner)
    batcher.add(b)
    shapes = [shape_of(run_step(batcher, runner)[0]) for _ in range(5)]
    assert shapes[0] == [("a", 1, 1, True), ("b", 0, 1, False)]
    assert shapes[4] == [("a", 5, 1, True), ("b", 4, 1, False)]
    assert batcher.kv.pool.num_free == 0
    decision, _ = run_step(batcher, runner)
    assert (decision.preempted, shape_of(decision)) == (("b",), [("a", 6, 1, True)])
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (1, 2, 3, 4), "one of them is a's by now"
    while batcher.has_work:
        run_step(batcher, runner)
    assert a.output_token_ids == expected_output(a.token_ids[:1], 9)
    assert b.output_token_ids == expected_output(b.token_ids[:8], 2)


def test_a_preempted_request_goes_back_to_the_queue_with_nothing_computed() -> None:
    batcher = make_batcher(num_blocks=2, block_size=4, max_model_len=8)
    runner = make_runner(batcher)
    a, b = make_request("a", 3, arrival=0, max_tokens=5), make_request("b", 1, arrival=1, max_tokens=2)
    batcher.add(a)
    batcher.add(b)
    run_step(batcher, runner)
    assert len(batcher.queue) == 1, "b would leave no block for a"
    run_step(batcher, runner)
    decision, _ = run_step(batcher, runner)
    assert shape_of(decision) == [("a", 4, 1, True)]
    assert (b.status, b.num_preemptions) == (RequestStatus.WAITING, 0)


def test_what_can_never_fit_was_refused_before() -> None:
    batcher = make_batcher(num_blocks=4, block_size=4, max_model_len=100)
    with pytest.raises(AssertionError, match="more than 16 tokens"):
        batcher.add(make_request("a", 10, max_tokens=7))
    assert not batcher.has_work
    batcher.add(make_request("a", 10, max_tokens=6))
    with pytest.raises(AssertionError, match="more than 8 tokens"):
        make_batcher(max_model_len=8).add(make_request("a", 5, max_tokens=4))


def test_a_request_is_added_once() -> None:
    batcher = make_batcher()
    batcher.add(make_request("a"))
    run_step(batcher, make_runner(batcher))
    with pytest.raises(AssertionError, match="a runs already"):
        batcher.add(make_request("a"))


@pytest.mark.parametrize("position", range(7))
def test_limits_below_their_least_stop_the_start(position: int) -> None:
    names = [field.name for field in fields(BatchConfig) if field.name.startswith("max_")]
    limits: dict[str, Any] = dict.fromkeys(names, 4)
    least = {"max_preemptions": 0, "max_logits_rows": limits["max_num_seqs"]}.get(names[position], 1)
    limits[names[position]] = least
    BatchConfig(**limits)
    limits[names[position]] = least - 1
    with pytest.raises(StartRefused, match=rf"max-[a-z-]+ is {least - 1}: it must be at least {least}"):
        BatchConfig(**limits)


def learn_costs(batcher: ContinuousBatcher) -> None:
    """Steps of 10 ms, and 1 ms more for each prompt token."""
    for step in range(40):
        tokens = 64 * (step % 2)
        batcher.rates.observe(tokens, 4, 0.01 + 0.001 * tokens)


def test_a_prompt_beside_decodes_is_cut_to_the_time_that_a_step_may_take() -> None:
    batcher = make_batcher(num_blocks=200, max_model_len=400, max_num_batched_tokens=256, gap_limit_s=0.11)
    runner = start_decoding(batcher, 2)
    learn_costs(batcher)
    batcher.add(make_request("long", 240, arrival=9, max_tokens=4))
    chunks = [shape_of(run_step(batcher, runner)[0])[2] for _ in range(3)]
    assert chunks[0] == pytest.approx(("long", 0, 100, False), abs=1)
    assert [chunk[2] for chunk in chunks] == [chunks[0][2], chunks[0][2], 240 - 2 * chunks[0][2]]


def test_with_nobody_to_wait_for_a_token_a_prompt_gets_the_whole_budget() -> None:
    batcher = make_batcher(num_blocks=200, max_model_len=400, max_num_batched_tokens=256, gap_limit_s=0.11)
    learn_costs(batcher)
    batcher.add(make_request("long", 240, max_tokens=4))
    assert shape_of(batcher.step()) == [("long", 0, 240, True)]


def test_a_machine_that_is_too_slow_for_the_gap_still_computes_prompts() -> None:
    batcher = make_batcher(num_blocks=200, max_model_len=400, max_num_batched_tokens=256, gap_limit_s=0.001)
    start_decoding(batcher, 2)
    learn_costs(batcher)
    batcher.add(make_request("long", 240, arrival=9, max_tokens=4))
    assert shape_of(batcher.step())[2] == ("long", 0, 64, False)


def test_while_no_rate_is_known_a_prompt_beside_decodes_comes_in_small_chunks() -> None:
    batcher = make_batcher(num_blocks=200, max_model_len=400, max_num_batched_tokens=256, gap_limit_s=0.11)
    start_decoding(batcher, 2)
    assert not batcher.rates.is_known
    batcher.add(make_request("long", 240, arrival=9, max_tokens=4))
    assert shape_of(batcher.step())[2] == ("long", 0, 64, False)


def test_a_background_prompt_gets_one_token_a_step_while_anyone_waits_for_a_reply() -> None:
    batcher = make_batcher(max_num_batched_tokens=32)
    runner = start_decoding(batcher, 2)
    batcher.add(make_request("line", 20, arrival=9, priority=MAX_PRIORITY))
    shapes = [shape_of(run_step(batcher, runner)[0])[2:] for _ in range(2)]
    assert shapes == [[("line", 0, 1, False)], [("line", 1, 1, False)]]
    for name in ("r0", "r1"):
        batcher.finish(name, FinishReason.ABORT)
    assert shape_of(run_step(batcher, runner)[0]) == [("line", 2, 18, True)]
    batcher.add(make_request("other", 12, arrival=10, priority=MAX_PRIORITY))
    batcher.add(make_request("asked", 9, arrival=11))
    assert [entry[:3] for entry in shape_of(batcher.step())] == [
        ("line", 20, 1),
        ("other", 0, 12),
        ("asked", 0, 9),
    ]


def test_nobody_waits_for_a_prefix_that_is_computed_in_the_background() -> None:
    batcher = make_batcher(max_num_batched_tokens=32, prefix_caching=True)
    runner = start_decoding(batcher, 1)
    shared = list(range(500, 512))
    batcher.add(make_request("line", shared, arrival=8, priority=MAX_PRIORITY))
    run_step(batcher, runner)
    batcher.add(make_request("asked", shared, arrival=9))
    assert [entry[:3] for entry in shape_of(batcher.step())][1:] == [("line", 1, 1), ("asked", 0, 12)]
