"""Recurrent and hybrid models under the real scheduler give transformers' own tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import OutOfDeviceMemory
from engine.plan.kv.paged_kv_manager import PagedKvManager, Rewindable
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import read_answers
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import BatchDecision
from tests.support.factories import make_batcher, make_request
from tests.support.half_right import HalfRight
from tests.support.packed import random_tokens
from tests.support.recurrent import generated, load_recurrent, make_recurrent_runner, serve
from tests.support.tiny_models import RECURRENT_FAMILIES

PROMPT_LENGTHS = (23, 1, 9, 40, 5, 14, 2, 17, 30)
MAX_TOKENS = (12, 20, 3, 9, 16, 1, 11, 8, 6)
# By the number of the step before which they come: some together, some while others decode.
ARRIVALS = ((0, (0, 1)), (3, (2, 3, 4)), (9, (5,)), (12, (6, 7, 8)))


def make_requests(**sampling: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        make_request(
            f"request-{index}",
            random_tokens(rng, length),
            arrival=index,
            max_tokens=MAX_TOKENS[index],
            seed=100 + index,
            **sampling,
        )
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def arrivals_of(requests: list[Request]) -> dict[int, list[Request]]:
    return {step: [requests[index] for index in indices] for step, indices in ARRIVALS}


def prompt_of(request: Request) -> list[int]:
    return request.token_ids[: request.num_prompt_tokens]


def output_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def reference_outputs(family: str) -> list[list[int]]:
    return [
        generated(family, prompt_of(request), request.sampling.max_tokens)
        for request in make_requests(temperature=0.0)
    ]


@pytest.mark.by_default("mamba", "granite_hybrid_moe", "qwen3_5_hybrid", "rwkv", "lfm2_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_greedy_tokens_are_transformers_own(family: str) -> None:
    """Chunked prefill, requests that join and leave, four seats for nine."""
    requests = make_requests(temperature=0.0)
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=16)
    seen: list[tuple[int, set[int]]] = []

    def look(decision: BatchDecision) -> None:
        if decision.inputs is not None and decision.inputs.state_slots is not None:
            seen.append((decision.num_prefill_tokens, set(decision.inputs.state_slots.tolist())))

    serve(batcher, make_recurrent_runner(family), arrivals_of(requests), look)
    assert [output_of(request) for request in requests] == reference_outputs(family)
    assert set.union(*(seats for _, seats in seen)) == {0, 1, 2, 3}
    assert any(0 < num_prefill < 40 and len(seats) > 1 for num_prefill, seats in seen)
    assert any(not num_prefill and len(seats) == 4 for num_prefill, seats in seen)
    batcher.kv.check_integrity()


@pytest.mark.by_default("mamba", "granite_hybrid_moe", "rwkv", "qwen3_next_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_preempted_sequence_is_computed_again_to_the_same_end(family: str) -> None:
    requests = make_requests(temperature=0.0)
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=13)
    runner = make_recurrent_runner(family, num_blocks=13)
    serve(batcher, runner, arrivals_of(requests))
    assert any(request.preemptions for request in requests)
    assert [output_of(request) for request in requests] == reference_outputs(family)


@pytest.mark.by_default("mamba", "granite_hybrid", "qwen3_5_hybrid", "lfm2_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_drawn_tokens_are_the_same_alone_and_in_a_crowd(family: str) -> None:
    crowd = make_requests(temperature=0.9, top_p=0.95)
    serve(
        make_batcher(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=13),
        make_recurrent_runner(family, num_blocks=13),
        arrivals_of(crowd),
    )
    for index, alone in enumerate(make_requests(temperature=0.9, top_p=0.95)):
        serve(make_batcher(max_num_seqs=1), make_recurrent_runner(family, num_slots=1), {0: [alone]})
        assert output_of(alone) == output_of(crowd[index])


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    [("mamba", 13), ("granite_hybrid", 13), ("qwen3_5_hybrid", 64), ("lfm2_hybrid", 13)],
)
def test_drafts_are_taken_back_from_states_and_tokens_stay_the_same(family: str, num_blocks: int) -> None:
    """Between chunks of prompts, in a crowd, and where some are preempted."""
    requests, expected = make_requests(temperature=0.0), reference_outputs(family)
    drafter = HalfRight(
        {
            request.request_id: prompt_of(request) + output
            for request, output in zip(requests, expected, strict=True)
        }
    )
    config = SpeculationConfig(512, 6, length_policy="fixed", min_acceptance_rate=0.0)
    costs = PassCosts()
    sources = [DraftSource(drafter, 6)]
    decoder = SpeculativeDecoder(config, sources, make_length_policy(config, costs), costs)
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=24, num_blocks=num_blocks, decoder=decoder)
    batcher.kv.rewindable = Rewindable.DRAFTS
    runner = make_recurrent_runner(family, num_blocks=num_blocks)
    for request in requests:
        batcher.add(request)
    together = 0
    while batcher.has_work:
        (link,) = decoder.links
        if jobs := link.jobs(ahead=False):
            link.take(read_answers(jobs, drafter.draft(jobs), 512))
        decision = batcher.step()
        together += sum(entry.num_drafts > 0 for entry in decision.scheduled) > 1
        if decision.inputs is not None:
            batcher.commit(decision, runner.run(decision.inputs).rows)
    assert [output_of(request) for request in requests] == expected
    stats = decoder.stats
    assert stats.num_accepted > 10 and stats.num_proposed - stats.num_accepted > 10 and together > 3
    assert (num_blocks == 13) == any(request.preemptions for request in requests)
    batcher.kv.check_integrity()


@pytest.mark.by_default("mamba", "nemotron_h_hybrid", "qwen3_next_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_what_makes_steps_fail_is_ended_alone_and_the_seats_serve_others(family: str) -> None:
    requests = make_requests(temperature=0.0)
    batcher = make_batcher(max_num_seqs=4, max_num_batched_tokens=16, max_decode_seqs=2)
    batcher.kv.rewindable = Rewindable.DRAFTS
    runner = make_recurrent_runner(family)
    for request in requests[:5]:
        batcher.add(request)
    for _ in range(7):
        decision = batcher.step()
        assert decision.inputs is not None
        batcher.commit(decision, runner.run(decision.inputs).rows)
    decision = batcher.step()
    assert decision.inputs is not None
    aboard = {entry.request_id for entry in decision.scheduled}
    assert 0 < len(aboard) < len(batcher.running), "some running request has to be left out"

    def fail(*_: object) -> None:
        raise RuntimeError("a shape is wrong")

    guilty, ended = max(aboard), set[str]()
    while not ended:
        assert decision.inputs is not None
        if guilty in {entry.request_id for entry in decision.scheduled}:
            hook = load_recurrent(family).model.register_forward_hook(fail)
            with pytest.raises(RuntimeError):
                runner.run(decision.inputs)
            hook.remove()
            ended |= {request.request_id for request in batcher.isolate(decision)}
        else:
            batcher.commit(decision, runner.run(decision.inputs).rows)
        decision = batcher.step() if not ended else decision
    assert ended == {guilty} != aboard
    serve(batcher, runner, {0: requests[5:]})
    for request, expected in zip(requests, reference_outputs(family), strict=True):
        if request.request_id in ended:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert output_of(request) == expected


@pytest.mark.by_default("mamba2", "rwkv", "bamba_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_step_that_ran_out_of_memory_is_tried_again_from_the_first_tokens(family: str) -> None:
    """No state can go back to before the step, so that whoever was aboard is computed again."""
    requests = make_requests(temperature=0.0)
    config = BatchConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_tokens=16,
        max_decode_seqs=4,
        max_model_len=64,
        max_logits_rows=16,
    )
    kv = PagedKvManager(64, 4, 4, 16, rewindable=Rewindable.DRAFTS)
    batcher = ContinuousBatcher(config, kv, make_policy("fcfs", 0.0))
    runner = make_recurrent_runner(family)
    for request in requests:
        batcher.add(request)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    number = 0
    while batcher.has_work:
        decision, number = batcher.step(), number + 1
        if decision.inputs is None:
            continue
        if number not in (5, 20):
            batcher.commit(decision, runner.run(decision.inputs).rows)
            continue
        hook = load_recurrent(family).model.register_forward_hook(fail)
        with pytest.raises(OutOfDeviceMemory):
            runner.run(decision.inputs)
        hook.remove()
        batcher.preempt_for_memory(decision)
    assert any(request.preemptions for request in requests)
    assert [output_of(request) for request in requests] == reference_outputs(family)
    kv.check_integrity()
