"""Steps decided before the last one's tokens are read: exactly what they hold, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision, LogitAdjustment, SampledRows
from tests.support.factories import make_batcher, make_request, shape_of


def decoding(batcher: ContinuousBatcher, *lengths: int, **how: Any) -> list[Request]:
    """Requests a, b, ... with prompts of these lengths, each with its first token, which is 7."""
    requests = [
        make_request(name, length, arrival=arrival, **{"max_tokens": 20, **how})
        for arrival, (name, length) in enumerate(zip("abcdef", lengths, strict=False))
    ]
    for request in requests:
        batcher.add(request)
    while any(request.num_output_tokens == 0 for request in requests):
        decision = batcher.step()
        num_rows = sum(entry.samples for entry in decision.scheduled)
        batcher.commit(decision, SampledRows([7] * num_rows))
    return requests


def two_steps(batcher: ContinuousBatcher) -> tuple[BatchDecision, BatchDecision]:
    """Two in flight."""
    first = batcher.step()
    second = batcher.step_ahead(first)
    assert second is not None
    return first, second


def held(batcher: ContinuousBatcher) -> tuple[int, int]:
    """(running requests, blocks in use)."""
    return len(batcher.running), batcher.kv.num_used_blocks


def test_a_step_ahead_exactly() -> None:
    batcher = make_batcher(block_size=4, max_num_seqs=4)
    a, b = decoding(batcher, 3, 5, seed=3)
    assert [batcher.kv.block_ids(name) for name in "ab"] == [(0,), (1, 2)]
    first, second = two_steps(batcher)
    assert shape_of(first) == [("a", 3, 1, True), ("b", 5, 1, True)]
    assert shape_of(second) == [("a", 4, 1, True), ("b", 6, 1, True)]
    assert (second.step_id, second.num_decode_tokens, second.num_tokens) == (first.step_id + 1, 2, 2)
    assert [batcher.kv.block_ids(name) for name in "ab"] == [(0, 3), (1, 2)]
    inputs = second.inputs
    assert inputs is not None and inputs.previous_rows is not None
    assert inputs.previous_rows.tolist() == [0, 1]
    assert inputs.token_ids.tolist() == [0, 0]
    assert inputs.positions.tolist() == [4, 6]
    assert inputs.slot_mapping.tolist() == [12, 10]
    assert inputs.kv_lens.tolist() == [5, 7]
    assert inputs.block_tables.tolist() == [[0, 3], [1, 2]]
    assert inputs.logits_rows.tolist() == [0, 1]
    assert inputs.sampling.position.tolist() == [5, 7]
    assert inputs.sampling.seed.tolist() == [3, 3]
    assert first.inputs is not None and first.inputs.previous_rows is None
    assert [a.num_tokens, a.num_computed_tokens] == [4, 3], "nothing is written into it"
    committed = batcher.commit(first, SampledRows([8, 9]))
    assert [(token.request, token.token_id, token.num_tokens) for token in committed] == [
        (a, 8, 5),
        (b, 9, 7),
    ]
    assert [a.num_tokens, a.num_computed_tokens] == [5, 4]
    third = batcher.step_ahead(second)
    assert third is not None and third.inputs is not None
    assert shape_of(third) == [("a", 5, 1, True), ("b", 7, 1, True)]
    batcher.commit(second, SampledRows([10, 11]))
    batcher.commit(third, SampledRows([12, 13]))
    assert (a.output_token_ids, b.output_token_ids) == ([7, 8, 10, 12], [7, 9, 11, 13])
    assert shape_of(batcher.step()) == [("a", 6, 1, True), ("b", 8, 1, True)]


def test_it_follows_the_last_chunk_of_a_prompt_but_no_earlier_one() -> None:
    batcher = make_batcher(max_num_batched_tokens=4)
    decoding(batcher, 2)
    batcher.add(make_request("b", 6, arrival=1))
    for chunk in ((0, 3, False), (3, 3, True)):
        decision = batcher.step()
        assert shape_of(decision)[1] == ("b", *chunk)
        ahead = batcher.step_ahead(decision)
        assert (ahead is not None) is chunk[2]
        batcher.commit(decision, SampledRows([1, 2]))
    assert ahead is not None
    assert shape_of(ahead) == [("a", 4, 1, True), ("b", 6, 1, True)]


def test_who_is_known_to_end_is_left_out() -> None:
    batcher = make_batcher()
    decoding(batcher, 2, max_tokens=2)
    b = make_request("b", 2, arrival=1, max_tokens=2)
    batcher.add(b)
    first, second = two_steps(batcher)
    assert shape_of(first) == [("a", 2, 1, True), ("b", 0, 2, True)]
    assert shape_of(second) == [("b", 2, 1, True)]
    assert second.inputs is not None and second.inputs.previous_rows is not None
    assert second.inputs.previous_rows.tolist() == [1]
    (ended, _) = batcher.commit(first, SampledRows([1, 2]))
    assert ended.finish_reason is FinishReason.LENGTH
    assert "a" not in batcher.kv, "no step in flight carries it"
    assert batcher.step_ahead(second) is None, "the second draws the last token of all"
    (ended,) = batcher.commit(second, SampledRows([3]))
    assert ended.finish_reason is FinishReason.LENGTH
    assert held(batcher) == (0, 0)


def test_who_stops_keeps_its_blocks_until_the_step_ahead_lands_and_gets_no_token_of_it() -> None:
    batcher = make_batcher(block_size=4, policy="fair")
    a, b = decoding(batcher, 4, 4, stop_token_ids=frozenset([2]))
    first, second = two_steps(batcher)
    ended, _ = batcher.commit(first, SampledRows([2, 5]))
    assert (ended.request, ended.finish_reason) == (a, FinishReason.STOP)
    assert batcher.kv.block_ids("a") == (0, 2)
    assert batcher.finish("a", FinishReason.ABORT) is None
    assert held(batcher) == (1, 4)
    charged = batcher._policy.key(b)
    (only,) = batcher.commit(second, SampledRows([9, 6]))
    assert (only.request, only.token_id, only.row) == (b, 6, 1)
    assert batcher._policy.key(b)[0] == charged[0] + 2, "an output token of one tenant counts 2"
    assert a.output_token_ids == [7, 2]
    assert "a" not in batcher.kv
    third = batcher.step()
    assert third.inputs is not None
    assert third.inputs.moves.scrub_blocks == (), "its row was good, so all of it was"


def test_what_ends_outside_while_two_steps_fly() -> None:
    batcher = make_batcher(block_size=4)
    a, b = decoding(batcher, 4, 4)
    first, second = two_steps(batcher)
    assert batcher.finish("a", FinishReason.ABORT) is a
    assert [token.request for token in batcher.commit(first, SampledRows([1, 2]))] == [b]
    assert batcher.kv.block_ids("a") == (0, 2)
    assert [token.request for token in batcher.commit(second, SampledRows([3, 4]))] == [b]
    assert "a" not in batcher.kv
    assert a.output_token_ids == [7]
    third = batcher.step()
    assert third.inputs is not None and third.inputs.moves.scrub_blocks == (0, 2)


def test_a_row_that_failed_ends_its_request_and_is_scrubbed_when_the_step_ahead_lands() -> None:
    batcher = make_batcher(block_size=4)
    a, b = decoding(batcher, 4, 4)
    first, second = two_steps(batcher)
    failed, _ = batcher.commit(first, SampledRows([0, 5], row_errors={0: "not finite"}))
    assert (failed.request, failed.finish_reason, failed.error) == (a, FinishReason.ERROR, "not finite")
    third = batcher.step_ahead(second)
    assert third is not None and third.inputs is not None
    assert third.inputs.moves.scrub_blocks == (), "the second may still write there"
    assert shape_of(third) == [("b", 6, 1, True)]
    committed = batcher.commit(second, SampledRows([0, 6]))
    assert [token.request for token in committed] == [b], "whatever its row says"
    assert "a" not in batcher.kv
    fourth = batcher.step_ahead(third)
    assert fourth is not None and fourth.inputs is not None
    assert set(fourth.inputs.moves.scrub_blocks) == {0, 2}, "a step ahead scrubs too"
    batcher.abandon(third)
    fifth = batcher.step()
    assert fifth.inputs is not None
    assert set(fifth.inputs.moves.scrub_blocks) == {0, 2}, "nobody knows whether the dropped one did"


# What is drawn once the tokens before it are known.


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ((1, 2),)},
    ],
)
def test_a_request_that_draws_by_its_history_has_the_draw_wait_and_not_the_pass(sampling: Any) -> None:
    batcher = make_batcher()
    decoding(batcher, 3, **sampling)
    first, second = two_steps(batcher)
    assert first.inputs is not None and not first.inputs.is_drawn_later
    assert second.inputs is not None and second.inputs.is_drawn_later
    assert second.inputs.sampling.adjustments == ()
    assert second.inputs.sampling.position.tolist() == [5]


def test_the_later_draw_is_by_all_tokens_before_it() -> None:
    batcher = make_batcher()
    for name, start, penalty in (("a", 0, 0.5), ("b", 10, 0.0), ("c", 20, 0.25)):
        prompt = range(start, start + 3)
        batcher.add(make_request(name, prompt, frequency_penalty=penalty, arrival=start, seed=start))
    batcher.commit(batcher.step(), SampledRows([7, 7, 7]))
    first, second = two_steps(batcher)
    batcher.commit(first, SampledRows([7, 8, 9]))
    sampling = batcher.sampling_ahead(second)
    assert second.inputs is not None
    assert (sampling.seed.tolist(), sampling.position.tolist()) == ([0, 10, 20], [5, 5, 5])
    assert [(each.row, each.frequency_penalty) for each in sampling.adjustments] == [(0, 0.5), (2, 0.25)]
    assert [counted(each) for each in sampling.adjustments] == [
        {0: 0, 1: 0, 2: 0, 7: 2},
        {20: 0, 21: 0, 22: 0, 7: 1, 9: 1},
    ]
    third = batcher.step_ahead(second)
    assert third is not None and third.inputs is not None and third.inputs.is_drawn_later
    batcher.commit(second, SampledRows([1, 2, 3]))
    assert [
        counted(each)[token]
        for each, token in zip(batcher.sampling_ahead(third).adjustments, (1, 3), strict=True)
    ] == [1, 1]


def counted(adjustment: LogitAdjustment) -> dict[int, int]:
    """How often the output has each token that the sequence has."""
    history = adjustment.history
    assert history is not None
    return dict(zip(history.token_ids.tolist(), history.in_output.tolist(), strict=True))


def test_bad_words_and_a_minimum_are_as_the_tokens_are_when_it_is_drawn() -> None:
    batcher = make_batcher()
    decoding(batcher, 3, bad_words=((1, 2),), min_tokens=4, stop_token_ids=frozenset([5]))
    first, second = two_steps(batcher)
    batcher.commit(first, SampledRows([1]))
    (adjustment,) = batcher.sampling_ahead(second).adjustments
    assert adjustment.banned_token_ids == (5, 2), "two of four tokens, and the word's first"
    third = batcher.step_ahead(second)
    assert third is not None
    batcher.commit(second, SampledRows([1]))
    assert batcher.sampling_ahead(third).adjustments[0].banned_token_ids == (5, 2)
    fourth = batcher.step_ahead(third)
    assert fourth is not None
    batcher.commit(third, SampledRows([3]))
    assert batcher.sampling_ahead(fourth).adjustments == (), "four tokens, and another word"


@pytest.mark.parametrize("how", ["stop", "abort", "error"])
def test_who_has_ended_meanwhile_is_drawn_for_by_its_columns_alone(how: str) -> None:
    batcher = make_batcher()
    a, _ = decoding(batcher, 3, 3, presence_penalty=0.5, stop_token_ids=frozenset([2]))
    first, second = two_steps(batcher)
    errors = {0: "not finite"} if how == "error" else None
    batcher.commit(first, SampledRows([2 if how == "stop" else 3, 4], row_errors=errors))
    if how == "abort":
        assert batcher.finish("a", FinishReason.ABORT) is a
    sampling = batcher.sampling_ahead(second)
    assert sampling.num_rows == 2
    assert [adjustment.row for adjustment in sampling.adjustments] == [1]
    committed = batcher.commit(second, SampledRows([8, 9]))
    assert [(token.request.request_id, token.token_id) for token in committed] == [("b", 9)]
    assert "a" not in batcher.kv


def test_a_step_to_be_drawn_later_is_dropped_with_the_one_before_it() -> None:
    batcher = make_batcher()
    a, b = decoding(batcher, 3, 3, presence_penalty=0.5)
    first, _ = two_steps(batcher)
    assert batcher.abandon(first) == [a, b]
    again = batcher.step()
    assert again.inputs is not None and not again.inputs.is_drawn_later
    assert [counted(each) for each in again.inputs.sampling.adjustments] == [
        {0: 0, 1: 0, 2: 0, 7: 1},
        {10: 0, 11: 0, 12: 0, 7: 1},
    ]


def test_what_hangs_on_no_token_is_drawn_with_its_pass() -> None:
    for sampling, num_adjustments in (
        ({"logit_bias": ((5, 1.0),)}, 1),
        ({"allowed_token_ids": (5, 6)}, 1),
        ({"logprobs": 0}, 0),
    ):
        batcher = make_batcher()
        decoding(batcher, 3, **sampling)
        _, second = two_steps(batcher)
        assert second.inputs is not None and not second.inputs.is_drawn_later
        assert len(second.inputs.sampling.adjustments) == num_adjustments
        assert second.inputs.sampling.num_logprobs.tolist() == [sampling.get("logprobs", -1)]


def test_stop_tokens_are_banned_as_long_as_their_number_says() -> None:
    batcher = make_batcher()
    (a,) = decoding(batcher, 3, min_tokens=3, stop_token_ids=frozenset([2]))
    first, second = two_steps(batcher)
    assert first.inputs is not None and second.inputs is not None
    assert not second.inputs.is_drawn_later, "how many there are is known before which"
    assert [len(step.inputs.sampling.adjustments) for step in (first, second) if step.inputs] == [1, 1]
    batcher.commit(first, SampledRows([1]))
    third = batcher.step_ahead(second)
    assert third is not None and third.inputs is not None
    assert third.inputs.sampling.adjustments == (), "the fourth token may be a stop token"
    batcher.commit(second, SampledRows([1]))
    assert batcher.commit(third, SampledRows([2]))[0].finish_reason is FinishReason.STOP
    assert a.output_token_ids == [7, 1, 1, 2]


# When the next step has to wait.


def test_it_waits_for_who_could_be_seated() -> None:
    batcher = make_batcher(max_num_seqs=2)
    decoding(batcher, 3)
    decision = batcher.step()
    batcher.add(make_request("b", 3, arrival=1))
    assert batcher.step_ahead(decision) is None
    batcher.commit(decision, SampledRows([1]))
    decision = batcher.step()
    batcher.add(make_request("c", 3, arrival=2))
    assert batcher.step_ahead(decision) is not None, "there is no seat for it"


def test_it_waits_where_decodes_take_turns() -> None:
    batcher = make_batcher(max_decode_seqs=2)
    decoding(batcher, 2, 2, 2)
    decision = batcher.step()
    assert len(decision.scheduled) == 2
    assert batcher.step_ahead(decision) is None


def test_it_takes_free_blocks_only_and_all_or_none() -> None:
    batcher = make_batcher(num_blocks=3, block_size=4, max_model_len=12)
    decoding(batcher, 3, 3, max_tokens=5)
    assert batcher.kv.pool.num_free == 1
    first = batcher.step()
    assert batcher.step_ahead(first) is None
    assert batcher.kv.pool.num_free == 1
    batcher.commit(first, SampledRows([1, 2]))
    assert batcher.kv.pool.num_free == 1


def test_only_committed_blocks_are_published() -> None:
    batcher = make_batcher(block_size=4, prefix_caching=True)
    decoding(batcher, 6)
    assert batcher.kv.num_published("a") == 1
    first, second = two_steps(batcher)  # they compute positions 6 and 7
    batcher.commit(first, SampledRows([1]))
    assert batcher.kv.num_published("a") == 1
    batcher.commit(second, SampledRows([1]))
    assert batcher.kv.num_published("a") == 2


def test_blocks_are_moved_by_one_step_only() -> None:
    batcher = make_batcher(num_blocks=5, max_model_len=20, preemption="swap", num_host_blocks=5)
    decoding(batcher, 7, 7, max_tokens=9)
    batcher.commit(batcher.step(), SampledRows([1, 1]))
    first, second = two_steps(batcher)
    assert first.inputs is not None and second.inputs is not None
    assert first.swapped == ("b",)
    assert len(first.inputs.moves.swap_out) == 2
    assert second.inputs.moves.swap_out == (), "its blocks are another's by now"
    batcher = make_batcher()
    batcher.add(make_request("a", 3, max_tokens=9))
    batcher.add(make_request("b", range(3), arrival=1, fork_of="a"))
    batcher.commit(batcher.step(), SampledRows([1]))
    first, second = two_steps(batcher)
    assert first.inputs is not None and second.inputs is not None
    assert len(first.inputs.moves.block_copies) == 1
    assert second.inputs.moves.block_copies == ()


# When a step fails.


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    batcher = make_batcher()
    a, b = decoding(batcher, 3, 3)
    first, _ = two_steps(batcher)
    batcher.finish("b", FinishReason.ABORT)
    batcher.abandon(first)
    assert "b" not in batcher.kv
    assert (a.num_computed_tokens, a.status) == (3, RequestStatus.RUNNING)
    again = batcher.step()
    assert shape_of(again) == [("a", 3, 1, True)]
    assert again.inputs is not None and again.inputs.previous_rows is None
    batcher.isolate(again)
    assert held(batcher) == (0, 0)
    assert [request.finish_reason for request in (a, b)] == [FinishReason.ERROR, FinishReason.ABORT]


def test_a_step_ahead_that_fails_takes_nothing_of_the_one_before() -> None:
    batcher = make_batcher()
    (a,) = decoding(batcher, 3)
    first, second = two_steps(batcher)
    batcher.commit(first, SampledRows([4]))
    batcher.abandon(second)
    assert a.output_token_ids == [7, 4]
    assert shape_of(batcher.step()) == [("a", 4, 1, True)]


def test_out_of_memory_with_two_in_flight() -> None:
    batcher = make_batcher()
    a, b = decoding(batcher, 3, 3)
    first, _ = two_steps(batcher)
    batcher.preempt_for_memory(first)
    assert [request.num_preemptions for request in (a, b)] == [0, 1]
    decision = batcher.step()
    assert decision.preempted == ("b",)
    assert shape_of(decision) == [("a", 3, 1, True)]


def test_the_protocol() -> None:
    batcher = make_batcher()
    decoding(batcher, 3)
    first, second = two_steps(batcher)
    with pytest.raises(AssertionError, match="neither committed nor abandoned"):
        batcher.step()
    with pytest.raises(AssertionError, match="the only one in flight"):
        batcher.step_ahead(second)
    for land in (
        lambda: batcher.commit(second, SampledRows([1])),
        lambda: batcher.abandon(second),
    ):
        with pytest.raises(AssertionError, match="not the one in flight"):
            land()
    batcher.commit(first, SampledRows([1]))
    with pytest.raises(AssertionError, match="not the one in flight"):
        batcher.step_ahead(first)
