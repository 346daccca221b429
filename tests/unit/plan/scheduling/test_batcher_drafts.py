"""What a step verifies beside decodes and prefill, exactly, and what is committed and held after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.plan.request import FinishReason, Request, RequestStatus, SpeculationOptions
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.in_flight import CommittedToken
from engine.plan.speculation.drafter import Draft
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import NO_TOKEN, BatchDecision, SampledRows
from tests.support.engines import EngineShape, make_decoder
from tests.support.factories import make_batcher, make_request, make_runner, preempted, run_step
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import FakeRunner, expected_output

LONGEST = 8  # drafts


class Bench:
    """A batcher whose drafts the test writes itself."""

    def __init__(self, *, max_draft_tokens: int = LONGEST, **sizes: Any) -> None:
        self.decoder: SpeculativeDecoder = make_decoder(
            EngineShape(max_draft_tokens=max_draft_tokens), [FakeDrafter(method="ngram")]
        )
        self.batcher: ContinuousBatcher = make_batcher(decoder=self.decoder, **{"block_size": 4, **sizes})
        self.runner: FakeRunner = make_runner(self.batcher)

    def add(self, request_id: str, prompt: Sequence[int] | int = 3, **how: Any) -> Request:
        request = make_request(request_id, prompt, **{"max_tokens": 30, **how})
        self.batcher.add(request)
        return request

    def decoding(self, *request_ids: str, prompt: int = 3, **how: Any) -> list[Request]:
        """Requests that have their first token."""
        requests = [self.add(name, prompt, arrival=i, **how) for i, name in enumerate(request_ids)]
        while any(request.num_output_tokens == 0 for request in requests):
            self.step()
        return requests

    def draft(self, request: Request, *token_ids: int, parents: tuple[int, ...] | None = None) -> None:
        """Put these drafts on a request's tape."""
        jobs = {job.request.request_id: job for job in self.decoder.links[0].jobs(ahead=False)}
        job = jobs[request.request_id]
        draft = Draft(request.request_id, job.epoch, job.next_position, token_ids, parents)
        self.decoder.links[0].put(job, draft)

    def draft_right(self, request: Request, num_right: int, num_wrong: int = 0) -> None:
        """Drafts of which so many come true."""
        right = coming(request, num_right + num_wrong)
        wrong = [(token + 1) % 257 for token in right[num_right:]]
        self.draft(request, *right[:num_right], *wrong)

    def step(self) -> tuple[BatchDecision, list[CommittedToken]]:
        return run_step(self.batcher, self.runner)

    def blocks(self, request: Request) -> tuple[int, ...]:
        return self.batcher.kv.block_ids(request.request_id)


def coming(request: Request, number: int) -> list[int]:
    """The tokens that follow."""
    return expected_output(request.token_ids, number)


def entries(decision: BatchDecision) -> list[tuple[str, int, int, int]]:
    """(who, first position, tokens, drafts among them)."""
    return [(s.request_id, s.first_position, s.num_tokens, s.num_drafts) for s in decision.scheduled]


# The budget.


def test_drafts_get_what_decodes_and_prefill_leave() -> None:
    bench = Bench(max_num_batched_tokens=9, max_num_seqs=3)
    a, b = bench.decoding("a", "b")
    bench.add("c", 5, arrival=9)
    bench.draft_right(a, 4)
    bench.draft_right(b, 4)
    decision, committed = bench.step()
    assert entries(decision) == [("c", 0, 5, 0), ("a", 3, 2, 1), ("b", 3, 2, 1)]
    assert (decision.num_decode_tokens, decision.num_prefill_tokens, decision.num_draft_tokens) == (2, 5, 2)
    assert decision.num_tokens == 9
    assert [(t.request.request_id, t.row) for t in committed] == [
        ("c", 0),
        ("a", 1),
        ("a", 2),
        ("b", 3),
        ("b", 4),
    ]


def test_without_budget_left_nothing_is_verified_and_the_drafts_stay() -> None:
    bench = Bench(max_num_batched_tokens=4, max_num_seqs=3)
    a, b = bench.decoding("a", "b", prompt=2)
    bench.add("c", 2, arrival=9)
    bench.draft_right(a, 3)
    decision, _ = bench.step()
    assert entries(decision) == [("a", 2, 1, 0), ("b", 2, 1, 0), ("c", 0, 2, 0)]
    assert entries(bench.step()[0])[-1] == ("a", 3, 2, 1), "what was right is still there, one shorter"
    assert b.num_output_tokens == 3


def test_decodes_without_drafts_come_first_then_chunks_then_those_with_drafts() -> None:
    bench = Bench(max_num_seqs=4)
    a, _, c = bench.decoding("a", "b", "c")
    bench.add("d", 6, arrival=9)
    bench.draft_right(c, 2)
    bench.draft_right(a, 1)
    decision, _ = bench.step()
    assert entries(decision) == [("b", 3, 1, 0), ("d", 0, 6, 0), ("a", 3, 2, 1), ("c", 3, 3, 2)]
    inputs = decision.inputs
    assert inputs is not None and inputs.drafts is not None
    assert inputs.drafts.sequence.tolist() == [2, 3]
    assert inputs.drafts.first_row.tolist() == [2, 4]
    assert inputs.logits_rows.tolist() == [0, 6, 7, 8, 9, 10, 11]


def num_rows(decision: BatchDecision) -> int:
    assert decision.inputs is not None
    return len(decision.inputs.logits_rows)


def test_drafts_get_the_rows_of_logits_that_others_leave_and_no_one_more_than_who_wants_few() -> None:
    bench = Bench(max_num_seqs=4, max_logits_rows=10)
    a, b, c = bench.decoding("a", "b", "c")
    for request, num_drafts in ((a, 5), (b, 1), (c, 5)):
        bench.draft_right(request, num_drafts)
    decision, _ = bench.step()
    assert entries(decision) == [("a", 3, 4, 3), ("b", 3, 2, 1), ("c", 3, 4, 3)]
    assert num_rows(decision) == 10
    assert entries(bench.step()[0])[-2:] == [("a", 7, 2, 1), ("c", 7, 2, 1)], "what was right is still there"


def test_only_a_prompt_that_is_through_takes_a_row() -> None:
    bench = Bench(max_num_seqs=4, max_num_batched_tokens=16, max_prefill_tokens=8, max_logits_rows=5)
    (a,) = bench.decoding("a")
    bench.add("b", 3, arrival=8)
    bench.add("c", 9, arrival=9)
    bench.draft_right(a, 8)
    decision, _ = bench.step()
    assert entries(decision) == [("b", 0, 3, 0), ("c", 0, 5, 0), ("a", 3, 4, 3)], "b has the fifth row"
    assert num_rows(decision) == 5


def test_rows_for_the_seats_alone_leave_every_sequence_its_token_and_no_draft() -> None:
    bench = Bench(max_num_seqs=3, max_logits_rows=3)
    for request in bench.decoding("a", "b", "c"):
        bench.draft_right(request, 8)
    for position in range(3, 6):
        decision, committed = bench.step()
        assert entries(decision) == [(name, position, 1, 0) for name in "abc"]
        assert len(committed) == num_rows(decision) == 3


def test_with_two_rows_a_seat_everyone_has_a_draft_verified() -> None:
    bench = Bench(max_num_seqs=4, max_logits_rows=8)
    requests = bench.decoding("a", "b", "c", "d")
    for request in requests:
        bench.draft_right(request, 8)
    decision, committed = bench.step()
    assert [entry[3] for entry in entries(decision)] == [1, 1, 1, 1]
    assert len(committed) == num_rows(decision) == 8


def test_rows_of_prompts_that_are_scored_do_not_count() -> None:
    """They are worked on a few at a time, beside the others."""
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=32, max_logits_rows=4)
    (a,) = bench.decoding("a")
    bench.add("b", 20, arrival=9, prompt_logprobs=0)
    bench.draft_right(a, 8)
    decision, _ = bench.step()
    assert entries(decision) == [("b", 0, 20, 0), ("a", 3, 3, 2)]
    assert decision.inputs is not None and decision.inputs.prompt_rows is not None
    assert (num_rows(decision), len(decision.inputs.prompt_rows.rows)) == (4, 19)


def test_a_decode_that_misses_its_turn_has_no_drafts_verified() -> None:
    bench = Bench(max_num_seqs=3, max_decode_seqs=2)
    a, b, c = bench.decoding("a", "b", "c")
    for request in (a, b, c):
        bench.draft_right(request, 1)
    served = {entry[0] for entry in entries(bench.step()[0])}
    assert len(served) == 2


def test_no_draft_is_verified_past_max_tokens() -> None:
    bench = Bench()
    (a,) = bench.decoding("a", max_tokens=4)
    bench.draft(a, *coming(a, 2))
    decision, committed = bench.step()
    assert entries(decision) == [("a", 3, 3, 2)], "the last token comes after the drafts"
    assert committed[-1].finish_reason is FinishReason.LENGTH
    assert a.output_token_ids == expected_output([0, 1, 2], 4)


# Blocks.


def test_drafts_are_cut_to_the_blocks_that_nobody_may_need_next() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2, max_model_len=24)
    a, b = bench.decoding("a", "b", max_tokens=20)
    assert bench.batcher.kv.pool.num_free == 4
    bench.draft_right(a, 8)
    bench.draft_right(b, 8)
    decision, _ = bench.step()
    # 4 free blocks less one for each of the two: a gets two more (4 tokens + 8 drafts), b what its own holds.
    assert entries(decision) == [("b", 3, 1, 0), ("a", 3, 9, 8)]
    assert not decision.preempted
    assert bench.batcher.kv.pool.num_free == 2


def test_drafts_fill_the_last_block_when_no_other_is_to_be_had() -> None:
    bench = Bench(num_blocks=2, max_num_seqs=1, max_model_len=8)
    (a,) = bench.decoding("a", prompt=1, max_tokens=7)
    bench.draft_right(a, 5)
    # The one other block is kept for the request itself; its first block has room for two drafts.
    assert entries(bench.step()[0]) == [("a", 1, 3, 2)]
    assert bench.blocks(a) == (0,)


def test_nobody_is_preempted_for_drafts() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=2, max_model_len=16)
    a, b = bench.decoding("a", "b", prompt=4, max_tokens=10)
    while a.status is b.status is RequestStatus.RUNNING:
        before = bench.batcher.kv.pool.num_free
        bench.draft_right(a, 3)
        bench.draft_right(b, 3)
        decision, _ = bench.step()
        if before:
            assert not decision.preempted
    assert not a.is_finished, "the decodes themselves ran out of blocks"
    while bench.batcher.has_work:
        bench.step()
    for request, prompt in ((a, [0, 1, 2, 3]), (b, [10, 11, 12, 13])):
        assert request.output_token_ids == expected_output(prompt, 10)


def test_blocks_of_rejected_drafts_are_given_back() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=1)
    (a,) = bench.decoding("a", max_tokens=20)
    assert bench.blocks(a) == (0,)
    bench.draft_right(a, 1, num_wrong=7)
    decision = bench.batcher.step()
    assert bench.blocks(a) == (0, 1, 2), "4 known tokens and 8 drafts"
    assert decision.inputs is not None
    rows = bench.runner.run(decision.inputs).rows
    assert rows.token_ids[2:] == [NO_TOKEN] * 7
    bench.batcher.commit(decision, rows)
    assert bench.blocks(a) == (0, 1), "5 tokens are computed, the sixth has its slot in the second block"
    assert (a.num_computed_tokens, a.num_tokens) == (5, 6)
    bench.batcher.kv.check_integrity()
    assert bench.step()[0].inputs is not None
    assert a.output_token_ids == expected_output([0, 1, 2], 4)


def test_the_blocks_that_a_spent_request_may_ever_need_outlive_a_round_of_drafts() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, max_model_len=24)
    bench.add("old", max_tokens=12)
    spent = make_request("spent", 3, arrival=1, max_tokens=12)
    preempted(spent, 8)
    bench.batcher.add(spent)
    bench.step()
    held = bench.blocks(spent)
    assert len(held) == 4, "blocks for 15 tokens"
    bench.draft_right(spent, 1, num_wrong=2)
    decision, committed = bench.step()
    assert entries(decision) == [("old", 3, 1, 0), ("spent", 3, 4, 3)]
    assert len(committed) == 3
    assert bench.blocks(spent) == held


def test_nobody_is_scheduled_without_a_block_where_the_oldest_and_a_spent_request_run_short() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=3, max_model_len=16)
    requests = {"old": bench.add("old", max_tokens=13)}
    for arrival, (name, length, max_tokens) in enumerate((("drafted", 3, 13), ("last", 1, 15)), start=1):
        requests[name] = make_request(name, length, arrival=arrival, max_tokens=max_tokens)
        preempted(requests[name], 8)
    bench.batcher.add(requests["drafted"])
    bench.step()
    bench.draft_right(requests["drafted"], 1, num_wrong=3)
    bench.step()
    bench.batcher.add(requests["last"])
    while bench.batcher.has_work:
        decision, _ = bench.step()
        for entry in decision.scheduled:
            request = requests[entry.request_id]
            if not request.is_finished:
                held = len(bench.blocks(request)) * 4
                assert held >= entry.first_position + entry.num_tokens - entry.num_drafts, entry.request_id
    for request in requests.values():
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_output(prompt, request.num_output_tokens)


def test_a_spent_request_drafts_into_the_blocks_that_it_holds_anyway() -> None:
    bench = Bench(num_blocks=5, max_num_seqs=1, max_model_len=20)
    spent = make_request("spent", 3, max_tokens=17)
    preempted(spent, 8)
    bench.batcher.add(spent)
    bench.step()
    assert bench.batcher.kv.pool.num_free == 0
    bench.draft_right(spent, 8)
    assert entries(bench.step()[0]) == [("spent", 3, 9, 8)]


def test_several_tokens_publish_every_block_they_fill() -> None:
    bench = Bench(prefix_caching=True, max_num_seqs=1)
    (a,) = bench.decoding("a")
    kv = bench.batcher.kv
    assert kv.num_published("a") == 0
    bench.draft_right(a, 7, num_wrong=1)
    bench.step()
    assert (a.num_computed_tokens, a.num_tokens) == (11, 12)
    assert kv.num_published("a") == 2
    bench.batcher.finish("a", FinishReason.ABORT)
    b = bench.add("b", a.token_ids)
    bench.step()
    assert b.num_cached_tokens == 8, "rejected drafts are in no published block"
    while bench.batcher.has_work:
        bench.step()
    assert b.output_token_ids == expected_output(a.token_ids, 30)


def test_a_fork_is_computed_from_a_parent_that_has_drafts() -> None:
    bench = Bench(max_num_seqs=3)
    (a,) = bench.decoding("a", prompt=6)
    bench.draft_right(a, 2, num_wrong=2)
    child = bench.add("a2", range(6), arrival=1, fork_of="a")
    decision, _ = bench.step()
    assert entries(decision) == [("a2", 5, 1, 0), ("a", 6, 5, 4)]
    assert decision.inputs is not None and len(decision.inputs.moves.block_copies) == 1
    bench.draft_right(child, 3)
    bench.draft_right(a, 3)
    while bench.batcher.has_work:
        bench.step()
    assert a.output_token_ids == child.output_token_ids == expected_output(range(6), 30)


# What is committed.


def test_accepted_drafts_and_the_token_after_them_are_committed_in_order() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    right = coming(a, 4)
    bench.draft_right(a, 3)
    _, committed = bench.step()
    assert [token.token_id for token in committed] == right
    assert [token.num_tokens for token in committed] == [5, 6, 7, 8]
    assert [token.row for token in committed] == [0, 1, 2, 3]
    assert (a.num_tokens, a.num_computed_tokens) == (8, 7)


def test_a_tree_commits_the_branch_that_came_true() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    first, second, third = coming(a, 3)
    wrong = (first + 1) % 257
    bench.draft(a, wrong, first, 7, second, parents=(-1, -1, 0, 1))
    decision, committed = bench.step()
    assert entries(decision) == [("a", 3, 5, 4)]
    assert decision.inputs is not None
    assert decision.inputs.positions.tolist() == [3, 4, 4, 5, 5]
    assert [token.token_id for token in committed] == [first, second, third]
    bench.step()
    assert a.output_token_ids == expected_output([0, 1, 2], 5)


def test_a_stop_token_among_the_drafts_ends_the_request_there() -> None:
    tokens = expected_output([0, 1, 2], 6)
    bench = Bench()
    (a,) = bench.decoding("a", stop_token_ids=frozenset(tokens[3:4]))
    bench.draft(a, *tokens[1:6])
    _, committed = bench.step()
    assert [token.finish_reason for token in committed] == [None, None, FinishReason.STOP]
    assert a.output_token_ids == tokens[:4]
    assert bench.batcher.kv.num_used_blocks == 0
    assert bench.decoder.links[0].jobs(ahead=True) == []


def test_a_stop_token_before_min_tokens_is_a_token_like_others() -> None:
    tokens = expected_output([0, 1, 2], 8)
    bench = Bench()
    (a,) = bench.decoding("a", stop_token_ids=frozenset({tokens[2], tokens[5]}), min_tokens=4)
    bench.draft(a, *tokens[1:2])
    bench.step()
    bench.draft(a, *tokens[3:8])
    _, committed = bench.step()
    assert a.output_token_ids == tokens[:6]
    assert committed[-1].finish_reason is FinishReason.STOP


def test_the_longest_output_ends_in_the_middle_of_accepted_drafts() -> None:
    tokens = expected_output([0, 1, 2], 3)
    bench = Bench()
    (a,) = bench.decoding("a", max_tokens=3)
    bench.draft(a, *tokens[1:2])
    _, committed = bench.step()
    assert [token.finish_reason for token in committed] == [None, FinishReason.LENGTH]
    assert a.spec_stats is not None
    assert (a.spec_stats.num_accepted, a.spec_stats.num_bonus, a.spec_stats.num_committed) == (1, 1, 2)


def test_a_policy_is_charged_for_every_committed_token_and_for_no_draft() -> None:
    charged: list[tuple[str, int, int]] = []
    bench = Bench(policy="fair", max_num_seqs=2)
    policy = bench.batcher._policy
    (a,) = bench.decoding("a")
    policy.charge = lambda request, prefill, decode: charged.append(  # type: ignore[assignment, method-assign]
        (request.request_id, prefill, decode)
    )
    bench.draft_right(a, 2, num_wrong=3)
    bench.step()
    assert charged == [("a", 0, 3)]


def test_one_who_wants_no_speculation_gets_none() -> None:
    bench = Bench(max_num_seqs=2)
    a = make_request("a", 3)
    a.speculation = SpeculationOptions(enabled=False)
    bench.batcher.add(a)
    bench.step()
    assert bench.decoder.links[0].jobs(ahead=True) == []
    assert a.spec_stats is None


# Failures.


def fail_row(bench: Bench, *rows: int) -> None:
    step = bench.runner.num_steps + 1
    bench.runner.row_errors = lambda number, row: (
        "injected" if (number, row) in {(step, r) for r in rows} else None
    )


def test_a_failing_row_ends_its_request_after_the_tokens_before_it() -> None:
    bench = Bench(max_num_seqs=2, prefix_caching=True)
    a, b = bench.decoding("a", "b")
    bench.draft_right(a, 4)
    fail_row(bench, 3)  # b's row is 0, a's are 1 to 5
    decision, committed = bench.step()
    assert entries(decision) == [("b", 3, 1, 0), ("a", 3, 5, 4)]
    assert [(t.request.request_id, t.finish_reason, t.error) for t in committed] == [
        ("b", None, None),
        ("a", None, None),
        ("a", None, None),
        ("a", FinishReason.ERROR, "injected"),
    ]
    assert a.output_token_ids == expected_output([0, 1, 2], 3)
    assert a.status is RequestStatus.FINISHED
    assert bench.batcher.kv.pool.num_free_kept == 0, "what it published may be spoiled too"
    following = bench.batcher.step()
    assert following.inputs is not None
    assert set(following.inputs.moves.scrub_blocks) == {0, 2}, "all that it held, with the drafts' blocks"
    bench.batcher.commit(following, bench.runner.run(following.inputs).rows)
    assert b.output_token_ids == expected_output([10, 11, 12], 3)


def test_a_first_row_that_fails_commits_nothing() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    bench.draft_right(a, 2)
    fail_row(bench, 0)
    _, committed = bench.step()
    assert [(t.finish_reason, t.error) for t in committed] == [(FinishReason.ERROR, "injected")]
    assert a.num_output_tokens == 1
    assert a.spec_stats is not None and a.spec_stats.num_rounds == 0


def test_spoiled_rows_behind_the_last_token_cost_a_recomputation_and_all_further_drafts() -> None:
    bench = Bench(max_num_seqs=2, prefix_caching=True)
    a, b = bench.decoding("a", "b")
    bench.draft_right(a, 1, num_wrong=3)
    fail_row(bench, 4)  # behind the rejected draft of row 3
    decision, committed = bench.step()
    assert entries(decision)[-1] == ("a", 3, 5, 4)
    assert [t.error for t in committed] == [None] * 3
    assert a.status is RequestStatus.PREEMPTED
    assert (a.num_computed_tokens, a.num_preemptions) == (0, 1)
    assert bench.decoder.links[0].jobs(ahead=True) != [], "b is drafted for as before"
    scrubbed: set[int] = set()
    while bench.batcher.has_work:
        decision = bench.batcher.step()
        assert decision.inputs is not None
        scrubbed |= set(decision.inputs.moves.scrub_blocks)
        bench.batcher.commit(decision, bench.runner.run(decision.inputs).rows)
        assert all(job.request.request_id != "a" for job in bench.decoder.links[0].jobs(ahead=True))
    assert scrubbed, "what the spoiled rows wrote is zeroed before anybody reads it"
    assert a.output_token_ids == expected_output([0, 1, 2], 30)
    assert b.output_token_ids == expected_output([10, 11, 12], 30)


@pytest.mark.parametrize("row", [3, 4], ids=["accepted", "rejected"])
def test_rows_that_fail_behind_the_end_of_a_request_are_scrubbed(row: int) -> None:
    tokens = expected_output([0, 1, 2], 6)
    bench = Bench(prefix_caching=True)
    (a,) = bench.decoding("a", stop_token_ids=frozenset(tokens[2:3]))
    bench.draft(a, *tokens[1:4], (tokens[4] + 1) % 257, 5)
    fail_row(bench, row)
    _, committed = bench.step()
    assert [token.finish_reason for token in committed] == [None, FinishReason.STOP]
    bench.add("b", 30, arrival=5, max_tokens=2)
    decision = bench.batcher.step()
    assert decision.inputs is not None
    assert set(decision.inputs.moves.scrub_blocks) == {1, 2}, "the first block was full of good tokens"
    bench.batcher.commit(decision, bench.runner.run(decision.inputs).rows)


def test_a_pass_that_fails_costs_no_draft() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    bench.draft_right(a, 3)
    decision = bench.batcher.step()
    bench.batcher.abandon(decision)
    again, committed = bench.step()
    assert entries(again) == entries(decision) == [("a", 3, 4, 3)]
    assert len(committed) == 4


def test_a_request_cancelled_in_flight_takes_its_drafts_blocks_with_it() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    bench.draft_right(a, 6)
    decision = bench.batcher.step()
    assert len(bench.blocks(a)) == 3
    bench.batcher.finish("a", FinishReason.ABORT)
    assert decision.inputs is not None
    rows = bench.runner.run(decision.inputs).rows
    assert bench.batcher.commit(decision, rows) == []
    assert bench.batcher.kv.num_used_blocks == 0
    assert bench.decoder.links[0].take_closed() == ["a"]


def test_a_verifier_that_accepts_nothing_still_moves_one_token() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    bench.draft_right(a, 0, num_wrong=3)
    decision = bench.batcher.step()
    token = coming(a, 1)[0]
    bench.batcher.commit(decision, SampledRows([token, NO_TOKEN, NO_TOKEN, NO_TOKEN]))
    assert (a.num_tokens, a.num_computed_tokens) == (5, 4)
    assert a.spec_stats is not None and a.spec_stats.num_recovered == 1


# Steps ahead.


def test_a_step_is_decided_ahead_only_where_no_drafts_are_to_be_had() -> None:
    bench = Bench()
    a, b = bench.decoding("a", "b")
    first = bench.batcher.step()
    second = bench.batcher.step_ahead(first)
    assert second is not None, "nobody has drafted anything"
    rows = bench.runner.run(first.inputs).rows if first.inputs else SampledRows([])
    bench.batcher.commit(first, rows)
    bench.draft_right(a, 3)  # beside the second
    assert bench.batcher.step_ahead(second) is None
    assert second.inputs is not None
    known = replace(second.inputs, token_ids=np.array(rows.token_ids, np.int64))
    bench.batcher.commit(second, bench.runner.run(known).rows)
    third, _ = bench.step()
    assert entries(third) == [("b", 5, 1, 0), ("a", 5, 3, 2)], "the second drew the first draft"
    assert a.output_token_ids == expected_output(a.token_ids[:3], 6)
    assert b.output_token_ids == expected_output(b.token_ids[:3], 4)


def test_no_step_is_decided_ahead_of_one_that_verifies() -> None:
    bench = Bench()
    (a,) = bench.decoding("a")
    bench.draft_right(a, 2)
    assert bench.batcher.step_ahead(bench.batcher.step()) is None


def test_nor_while_a_drafter_is_to_be_waited_for() -> None:
    bench = Bench()
    bench.decoding("a")
    bench.decoder.begin_step(bench.decoder.links)
    decision = bench.batcher.step()
    assert bench.batcher.step_ahead(decision) is None
    for _, view in bench.decoder.links[0]._clients.values():
        view.limit = 0  # drafts are not worth it now
    assert bench.batcher.step_ahead(decision) is not None
