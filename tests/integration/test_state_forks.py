"""Choices of one prompt of recurrent and hybrid models: their tokens are those of separate requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import load_settings
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.recurrent.slot_states import SlotStates
from engine.compute.runner.dummy_steps import Part
from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import Request
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import read_answers
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import BatchDecision, BlockMoves, StateCopy
from engine.startup.build import load_parts
from tests.support.factories import make_batcher, make_request
from tests.support.half_right import HalfRight
from tests.support.packed import random_tokens
from tests.support.recurrent import (
    generated,
    load_recurrent,
    make_recurrent_runner,
    pack_slots,
    serve,
    whole_logits,
    with_drafts,
)
from tests.support.tiny_models import RECURRENT_FAMILIES, save_tiny_model

PROMPT = random_tokens(np.random.default_rng(11), 22)
NUM_TOKENS = 10


def choices(*, forked: bool) -> list[Request]:
    """Four that draw, so that each has a text of its own and the smallest difference shows."""
    return [
        make_request(
            f"{seed}",
            PROMPT,
            arrival=seed,
            max_tokens=NUM_TOKENS,
            temperature=0.9,
            seed=seed,
            fork_of="0" if forked and seed else None,
        )
        for seed in range(4)
    ]


def served(family: str, *, forked: bool, **limits: Any) -> tuple[list[list[int]], list[BatchDecision]]:
    requests, batcher = choices(forked=forked), make_batcher(rewindable=Rewindable.DRAFTS, **limits)
    decisions: list[BatchDecision] = []
    runner = make_recurrent_runner(family, num_blocks=batcher.kv.num_blocks)
    serve(batcher, runner, {0: requests}, decisions.append)
    batcher.kv.check_integrity()
    return [request.token_ids for request in requests], decisions


def num_computed(decisions: list[BatchDecision]) -> int:
    return sum(decision.num_tokens for decision in decisions)


@pytest.mark.by_default("mamba-9", "granite_hybrid_moe-64", "qwen3_5_hybrid-9", "rwkv-64", "lfm2_hybrid-9")
@pytest.mark.parametrize("budget", [9, 64])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_forks_have_the_text_of_separate_requests_and_their_prompt_is_computed_once(
    family: str, budget: int
) -> None:
    expected, apart = served(family, forked=False, max_num_batched_tokens=budget)
    texts, together = served(family, forked=True, max_num_batched_tokens=budget)
    assert texts == expected
    assert len({tuple(text) for text in texts}) == 4, "each choice draws its own"
    assert num_computed(apart) - num_computed(together) == 3 * (len(PROMPT) - 1)
    copies = [copy for each in together if each.inputs is not None for copy in each.inputs.moves.state_copies]
    assert len(copies) == 3


@pytest.mark.parametrize("family", ["mamba2", "rwkv", "granite_hybrid", "qwen3_5_hybrid", "lfm2_hybrid"])
def test_forks_that_are_preempted_go_on_with_their_own_text(family: str) -> None:
    expected, _ = served(family, forked=False)
    texts, decisions = served(family, forked=True, num_blocks=13)
    assert any(decision.preempted for decision in decisions)
    assert texts == expected


@pytest.mark.parametrize("family", ["mamba2", "rwkv", "qwen3_5_hybrid", "lfm2_hybrid"])
def test_a_fork_whose_state_is_not_copied_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the equalities of these tests would mean little."""
    expected, _ = served(family, forked=False)

    def forgets(slots: SlotStates, copies: list[StateCopy]) -> None:
        for source, target in copies:
            slots.set_length(target, slots.length(source))

    monkeypatch.setattr(SlotStates, "copy", forgets)
    texts, _ = served(family, forked=True)
    assert texts[0] == expected[0] and texts[1:] != expected[1:]


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv", "granite_hybrid", "qwen3_5_hybrid"])
def test_forks_among_drafts_have_the_text_without(family: str) -> None:
    """The first choice's drafts are verified over a state that was held back, and the forks' over a copy."""
    expected = generated(family, PROMPT, NUM_TOKENS)
    requests = [
        make_request(
            f"{index}",
            PROMPT,
            arrival=index,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            fork_of="0" if index else None,
        )
        for index in range(3)
    ]
    drafter = HalfRight({request.request_id: [*PROMPT, *expected] for request in requests})
    config = SpeculationConfig(512, 6, length_policy="fixed", min_acceptance_rate=0.0)
    costs = PassCosts()
    decoder = SpeculativeDecoder(config, [DraftSource(drafter, 6)], make_length_policy(config, costs), costs)
    batcher = make_batcher(decoder=decoder, rewindable=Rewindable.DRAFTS)
    runner = make_recurrent_runner(family)
    for request in requests:
        batcher.add(request)
    num_copies = 0
    while batcher.has_work:
        (link,) = decoder.links
        if jobs := link.jobs(ahead=False):
            link.take(read_answers(jobs, drafter.draft(jobs), 512))
        decision = batcher.step()
        assert decision.inputs is not None
        num_copies += len(decision.inputs.moves.state_copies)
        batcher.commit(decision, runner.run(decision.inputs).rows)
    assert [request.token_ids[len(PROMPT) :] for request in requests] == [expected] * 3
    assert num_copies == 2 and decoder.stats.num_accepted > 5


@pytest.mark.parametrize("family", ["mamba2", "rwkv", "granite_hybrid", "qwen3_5_hybrid"])
def test_forks_of_a_pass_that_failed_have_their_own_text(family: str) -> None:
    """No slot of that pass can be gone on from, neither the parent's nor the copies."""
    expected, _ = served(family, forked=False)
    requests, batcher = choices(forked=True), make_batcher(rewindable=Rewindable.DRAFTS)
    runner, is_failed = make_recurrent_runner(family), False
    for request in requests:
        batcher.add(request)
    while batcher.has_work:
        decision = batcher.step()
        if decision.inputs is None:
            continue
        if decision.inputs.moves.state_copies and not is_failed:
            hook = load_recurrent(family).model.register_forward_hook(fail)
            with pytest.raises(RuntimeError):
                runner.run(decision.inputs)
            hook.remove()
            assert batcher.isolate(decision) == []
            is_failed = True
        else:
            batcher.commit(decision, runner.run(decision.inputs).rows)
        batcher.kv.check_integrity()
    assert is_failed and [request.token_ids for request in requests] == expected


def fail(*_: object) -> None:
    raise RuntimeError("a shape is wrong")


@pytest.mark.parametrize("family", ["mamba2", "lfm2_hybrid"])
def test_forks_are_served_where_nothing_drafts(family: str, tmp_path: Path) -> None:
    """A slot has room for the token that is held back, though no draft ever needs any."""
    flags = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "64", "--num-kv-blocks", "32")
    settings = load_settings(
        (str(save_tiny_model(family, tmp_path)), *flags, "--speculative-method", "none"), {}
    )
    num_threads = torch.get_num_threads()
    try:
        parts = load_parts(settings)
    finally:
        torch.set_num_threads(num_threads)
    assert isinstance(parts.runner, RecurrentRunner) and parts.runner.states.max_drafts == 1
    requests, decisions = choices(forked=True), list[BatchDecision]()
    serve(parts.batcher, parts.runner, {0: requests}, decisions.append)
    assert sum(len(each.inputs.moves.state_copies) for each in decisions if each.inputs is not None) == 3
    assert [request.token_ids for request in requests] == served(family, forked=False)[0]


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_slot_copied_behind_a_step_with_drafts_goes_on_from_any_of_them(family: str) -> None:
    """Both slots keep the rows of the drafts: each takes back another number of them."""
    runner = make_recurrent_runner(family)
    tokens, stop = PROMPT[:12], 9
    first = with_drafts(pack_slots({0: Part(tokens, 0, stop, range(8))}), [3])
    runner.run(first)
    for kept, slot in ((3, 1), (0, 2), (1, 3)):  # of the drafts
        begin = stop - 3 + kept
        step = pack_slots({slot: Part(tokens, begin, begin + 2, range(8))})
        rows = runner.run(replace(step, moves=BlockMoves(state_copies=(StateCopy(0, slot),)))).rows
        assert rows.token_ids == [int(whole_logits(family, tokens[: begin + 2])[-1].argmax())], kept
    rows = runner.run(pack_slots({0: Part(tokens, stop - 1, stop + 1, range(8))})).rows
    assert rows.token_ids == [int(whole_logits(family, tokens[: stop + 1])[-1].argmax())]
