"""Prompts that begin alike begin on a kept state, and their tokens are those without it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import read_answers
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from tests.support.factories import make_batcher, make_request
from tests.support.half_right import HalfRight
from tests.support.packed import random_tokens
from tests.support.recurrent import generated, load_recurrent, make_recurrent_runner, serve
from tests.support.tiny_models import RECURRENT_FAMILIES

RNG = np.random.default_rng(7)
SHARED = random_tokens(RNG, 21)
TAILS = [random_tokens(RNG, length) for length in (3, 9, 1, 14, 6, 11)]
MAX_TOKENS = 9
SNAPSHOTS = (1, 2, 16)


def caching_batcher(
    num_snapshots: int, num_blocks: int = 64, budget: int = 16, decoder: SpeculativeDecoder | None = None
) -> ContinuousBatcher:
    """With stops as close as the tiny prompts need."""
    batcher = make_batcher(
        decoder=decoder,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        num_snapshots=num_snapshots,
        rewindable=Rewindable.DRAFTS,
        prefix_caching=True,
    )
    batcher.running.lookup.stops.least = 4
    return batcher


def make_requests() -> list[Request]:
    return [
        make_request(
            f"request-{index}", [*SHARED, *tail], arrival=index, max_tokens=MAX_TOKENS, temperature=0.0
        )
        for index, tail in enumerate(TAILS)
    ]


def output_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def expected_outputs(family: str) -> list[list[int]]:
    return [generated(family, [*SHARED, *tail], MAX_TOKENS) for tail in TAILS]


@pytest.mark.by_default("mamba-1", "granite_hybrid_moe-2", "qwen3_5_hybrid-16", "rwkv-1", "lfm2_hybrid-2")
@pytest.mark.parametrize("num_snapshots", SNAPSHOTS)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_requests_one_after_another_share_what_they_begin_with(family: str, num_snapshots: int) -> None:
    """The first is computed, the second up to where they part, and the others begin there."""
    requests, batcher = make_requests(), caching_batcher(num_snapshots)
    runner = make_recurrent_runner(family, num_snapshots=num_snapshots)
    for request in requests:
        serve(batcher, runner, {0: [request]})
        batcher.kv.check_integrity()
    assert [output_of(request) for request in requests] == expected_outputs(family)
    if num_snapshots == 16:
        assert [request.num_cached_tokens for request in requests[2:]] == [20] * 4


@pytest.mark.by_default(
    *("mamba2-1", "bamba_hybrid-2", "qwen3_next_hybrid-16"),
    *("nemotron_h_hybrid-1", "granite_hybrid-2"),
)
@pytest.mark.parametrize("num_snapshots", SNAPSHOTS)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_requests_that_come_together_wait_for_the_first_one_s_state(family: str, num_snapshots: int) -> None:
    requests, batcher = make_requests(), caching_batcher(num_snapshots, budget=24)
    serve(batcher, make_recurrent_runner(family, num_snapshots=num_snapshots), {0: requests})
    assert [output_of(request) for request in requests] == expected_outputs(family)
    if num_snapshots == 16:
        assert [request.num_cached_tokens for request in requests[1:]] == [20] * 5
    batcher.kv.check_integrity()


@pytest.mark.by_default("mamba2", "qwen3_5_hybrid", "lfm2_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_the_next_turn_and_an_equal_prompt_begin_behind_what_was_computed(family: str) -> None:
    batcher, runner = caching_batcher(8), make_recurrent_runner(family, num_snapshots=8)
    prompt = [*SHARED, *TAILS[1]]
    first = make_request("first", prompt, max_tokens=15, temperature=0.0)
    again = make_request("again", prompt, arrival=1, max_tokens=15, temperature=0.0)
    serve(batcher, runner, {0: [first]})
    serve(batcher, runner, {0: [again]})
    assert output_of(first) == output_of(again) == generated(family, prompt, 15)
    assert again.num_cached_tokens == 28
    next_prompt = [*first.token_ids, *TAILS[3]]
    following = make_request("following", next_prompt, arrival=2, max_tokens=5, temperature=0.0)
    serve(batcher, runner, {0: [following]})
    assert following.num_cached_tokens == (len(first.token_ids) - 1) // 4 * 4
    assert output_of(following) == generated(family, next_prompt, 5)


@pytest.mark.by_default("mamba", "granite_hybrid_moe", "rwkv")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_preempted_requests_go_on_from_the_last_snapshot(family: str) -> None:
    requests, batcher = make_requests(), caching_batcher(8, num_blocks=17)
    serve(batcher, make_recurrent_runner(family, num_blocks=17, num_snapshots=8), {0: requests})
    assert any(request.preemptions for request in requests)
    assert [output_of(request) for request in requests] == expected_outputs(family)
    batcher.kv.check_integrity()


def test_a_request_that_is_aborted_half_way_leaves_nothing_that_is_not_good() -> None:
    requests, batcher = make_requests(), caching_batcher(4, budget=8)
    runner = make_recurrent_runner("qwen3_5_hybrid", num_snapshots=4)
    batcher.add(requests[0])
    for _ in range(2):
        decision = batcher.step()
        assert decision.inputs is not None
        batcher.commit(decision, runner.run(decision.inputs).rows)
    decision = batcher.step()
    assert decision.inputs is not None
    batcher.finish(requests[0].request_id, FinishReason.ABORT)
    batcher.commit(decision, runner.run(decision.inputs).rows)
    assert len(batcher.kv.snapshots) == 0
    batcher.kv.check_integrity()
    serve(batcher, runner, {0: requests[1:]})
    assert [output_of(request) for request in requests[1:]] == expected_outputs("qwen3_5_hybrid")[1:]


@pytest.mark.parametrize("family", ["mamba", "granite_hybrid", "qwen3_5_hybrid", "lfm2_hybrid"])
def test_states_are_saved_and_restored_between_drafts(family: str) -> None:
    """A state ends before the drafts of its step, wherever that is, and only that is kept."""
    requests, expected = make_requests(), expected_outputs(family)
    spoken = {
        request.request_id: request.token_ids + output
        for request, output in zip(requests, expected, strict=True)
    }
    drafter, config, costs = (
        HalfRight(spoken),
        SpeculationConfig(512, 6, length_policy="fixed", min_acceptance_rate=0.0),
        PassCosts(),
    )
    decoder = SpeculativeDecoder(config, [DraftSource(drafter, 6)], make_length_policy(config, costs), costs)
    batcher, runner = caching_batcher(8, decoder=decoder), make_recurrent_runner(family, num_snapshots=8)
    num_saved = 0
    for request in requests:
        batcher.add(request)
    while batcher.has_work:
        (link,) = decoder.links
        if jobs := link.jobs(ahead=False):
            link.take(read_answers(jobs, drafter.draft(jobs), 512))
        decision = batcher.step()
        assert decision.inputs is not None
        drafted = {entry.request_id for entry in decision.scheduled if entry.num_drafts}
        rows = {batcher.kv.row(request_id) for request_id in drafted}
        num_saved += sum(row in rows for row, _ in decision.inputs.moves.state_saves)
        batcher.commit(decision, runner.run(decision.inputs).rows)
    assert [output_of(request) for request in requests] == expected
    assert decoder.stats.num_accepted > 5 and num_saved > 0
    following = make_request("next", [*requests[0].token_ids, 7, 8], arrival=9, max_tokens=3, temperature=0.0)
    prompt = list(following.token_ids)
    batcher.add(following)
    while batcher.has_work:
        decision = batcher.step()
        assert decision.inputs is not None
        batcher.commit(decision, runner.run(decision.inputs).rows)
    assert following.num_cached_tokens >= 20
    assert output_of(following) == generated(family, prompt, 3)


@pytest.mark.parametrize("family", ["mamba", "qwen3_5_hybrid"])
def test_a_pass_that_fails_leaves_no_state_and_takes_none_from_others(family: str) -> None:
    """Whoever was aboard begins anew on blocks of its own: those that are shared stay as they are."""
    requests, batcher = make_requests(), caching_batcher(8)
    runner = make_recurrent_runner(family, num_snapshots=8)
    for request in requests[:2]:
        serve(batcher, runner, {0: [request]})
    for request in requests[2:]:
        batcher.add(request)

    def fail(*_: object) -> None:
        raise RuntimeError("a shape is wrong")

    guilty, number = requests[3].request_id, 0
    while batcher.has_work:
        decision, number = batcher.step(), number + 1
        assert decision.inputs is not None
        if number < 2 or guilty not in {entry.request_id for entry in decision.scheduled}:
            batcher.commit(decision, runner.run(decision.inputs).rows)
            continue
        hook = load_recurrent(family).model.register_forward_hook(fail)
        with pytest.raises(RuntimeError):
            runner.run(decision.inputs)
        hook.remove()
        batcher.isolate(decision)
        batcher.kv.check_integrity()
    assert requests[3].finish_reason is FinishReason.ERROR
    others = [index for index in range(6) if index != 3]
    assert [output_of(requests[index]) for index in others] == [expected_outputs(family)[i] for i in others]
    last = make_request("last", [*SHARED, 3, 4], arrival=9, max_tokens=4, temperature=0.0)
    serve(batcher, runner, {0: [last]})
    assert last.num_cached_tokens == 20
    assert output_of(last) == generated(family, [*SHARED, 3, 4], 4)
