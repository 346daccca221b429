"""Recurrent and hybrid models whose requests give way: states come back from the host as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import load_settings
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.recurrent.slot_states import HostStates, state_bytes
from engine.compute.runner.device import Mark, mark
from engine.compute.runner.dummy_steps import Part
from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import read_answers
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import BatchDecision, BlockCopy, BlockMoves, StateCopy
from engine.startup.build import load_parts
from tests.support.factories import make_batcher, make_request
from tests.support.half_right import HalfRight
from tests.support.packed import random_tokens
from tests.support.recurrent import (
    BLOCK_SIZE,
    generated,
    load_recurrent,
    make_recurrent_runner,
    pack_slots,
    serve,
)
from tests.support.tiny_models import RECURRENT_FAMILIES, save_tiny_model

NUM_TOKENS = 10
SOME = ["mamba2", "rwkv", "granite_hybrid", "qwen3_5_hybrid", "lfm2_hybrid"]
HOST_ROOM = (64, 6)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    shared = random_tokens(rng, 9)
    return [[*shared, *random_tokens(rng, 4 + 3 * index)] for index in range(4)]


def requests_of(temperature: float = 0.9) -> list[Request]:
    return [
        make_request(
            f"{seed}", prompt, arrival=seed, max_tokens=NUM_TOKENS, temperature=temperature, seed=seed
        )
        for seed, prompt in enumerate(prompts())
    ]


def swapping(**limits: Any) -> ContinuousBatcher:
    """One with too few blocks for all of them."""
    num_blocks, num_states = HOST_ROOM
    room: dict[str, Any] = {
        "preemption": "swap",
        "num_host_blocks": num_blocks,
        "num_host_states": num_states,
    }
    return make_batcher(rewindable=Rewindable.DRAFTS, **({"num_blocks": 13} | room | limits))


def served(family: str, batcher: ContinuousBatcher) -> tuple[list[list[int]], list[BatchDecision]]:
    requests = requests_of()
    decisions: list[BatchDecision] = []
    runner = make_recurrent_runner(
        family,
        num_blocks=batcher.kv.num_blocks,
        num_snapshots=batcher.kv.snapshots.num_slots,
        host_room=HOST_ROOM,
    )
    serve(batcher, runner, {0: requests}, decisions.append)
    batcher.kv.check_integrity()
    assert batcher.kv.host.num_saved == 0
    return [request.token_ids for request in requests], decisions


def states_moved(decisions: Sequence[BatchDecision]) -> tuple[int, int]:
    moves = [decision.inputs.moves for decision in decisions if decision.inputs is not None]
    return sum(len(each.states_out) for each in moves), sum(len(each.states_in) for each in moves)


@pytest.mark.by_default(
    *("mamba-False", "granite_hybrid_moe-True", "qwen3_5_hybrid-False"),
    *("rwkv-True", "lfm2_hybrid-False"),
)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_requests_that_were_swapped_go_on_with_their_own_text(family: str, caching: bool) -> None:
    expected, alone = served(family, make_batcher(rewindable=Rewindable.DRAFTS))
    texts, decisions = served(family, swapping(prefix_caching=caching, num_snapshots=4 * caching))
    out, back = states_moved(decisions)
    assert out == back > 0 == sum(states_moved(alone))
    assert texts == expected
    assert len({tuple(text) for text in texts}) == 4


@pytest.mark.parametrize("family", [family for family in SOME if family != "rwkv"])  # hardly reads its own
def test_a_state_that_is_not_brought_back_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the equalities of these tests would mean little."""
    expected, _ = served(family, make_batcher(rewindable=Rewindable.DRAFTS))

    def forgets(host: HostStates, copies: list[StateCopy]) -> None:
        for place, slot in copies:
            kept = host._kept[place]
            for tensor in host._slots.tensors:
                tensor[slot] = 0.0
            host._slots.set_length(slot, kept.num_tokens, kept.num_drafts)

    monkeypatch.setattr(HostStates, "restore", forgets)
    texts, _ = served(family, swapping())
    assert texts != expected


@pytest.mark.parametrize("family", SOME)
def test_drafts_that_were_accepted_before_a_swap_are_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows lie beside the state, which has not taken them in. With nine blocks there are some."""
    brought_back: dict[int, int] = {}  # by slot: the tokens that its state has taken in
    restore = HostStates.restore

    def watched(host: HostStates, copies: Sequence[StateCopy]) -> None:
        restore(host, copies)
        brought_back.update((slot, host._slots.length(slot)) for _, slot in copies)

    monkeypatch.setattr(HostStates, "restore", watched)
    texts = [generated(family, prompt, NUM_TOKENS) for prompt in prompts()]
    requests = requests_of(temperature=0.0)
    _, decisions = drafted(family, requests, texts, num_blocks=9)
    first = {
        copy.target: first_position(decision, copy.target)
        for decision in decisions
        if decision.inputs is not None
        for copy in decision.inputs.moves.states_in
    }
    assert any(first[slot] > length for slot, length in brought_back.items()), "none had been accepted"
    assert [request.output_token_ids for request in requests] == texts


def first_position(decision: BatchDecision, slot: int) -> int:
    """Where the sequence in this slot goes on in this step."""
    inputs = decision.inputs
    assert inputs is not None and inputs.state_slots is not None
    place = inputs.state_slots.tolist().index(slot)
    return int(inputs.kv_lens[place] - inputs.query_lens[place])


@pytest.mark.parametrize(("family", "num_blocks"), [("mamba2", 0), ("qwen3_5_hybrid", 1)])
def test_bytes_of_states_are_counted_with_those_of_blocks(family: str, num_blocks: int) -> None:
    """`num_blocks` move beside a state; a model that attends nowhere has no bytes in a block."""
    loaded = load_recurrent(family)
    runner = make_recurrent_runner(family, max_drafts=3, host_room=(2, 2))
    assert bool(loaded.layers) == bool(num_blocks)
    inputs = pack_slots({0: Part([1, 2, 3], 0, 3, [0])})
    assert runner.run(inputs).swap_bytes == 0
    out = replace(
        pack_slots({1: Part([4, 5], 0, 2, [1])}),
        moves=BlockMoves(states_out=(StateCopy(0, 1),), swap_out=(BlockCopy(0, 0),) * num_blocks),
    )
    block_bytes = bytes_per_block(loaded.layers, BLOCK_SIZE, loaded.kv_dtype)
    each = state_bytes(loaded.states, loaded.dtype, max_drafts=3)
    assert runner.run(out).swap_bytes == each + num_blocks * block_bytes
    back = replace(
        pack_slots({2: Part([1, 2, 3, 4], 3, 4, [2])}),
        moves=BlockMoves(states_in=(StateCopy(1, 2),), swap_in=(BlockCopy(0, 2),) * num_blocks),
    )
    assert runner.run(back).swap_bytes == each + num_blocks * block_bytes


def test_memory_of_the_host_is_taken_before_the_clock_of_a_swap_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long where it is pinned, and only once."""
    runner = make_recurrent_runner("granite_hybrid", host_room=(8, 2))
    step = pack_slots({0: Part(random_tokens(np.random.default_rng(1), 6), 0, 6, range(16))})
    runner.run(step)
    events: list[str] = []
    room = HostStates._room

    def seen_room(host: HostStates, like: torch.Tensor) -> torch.Tensor:
        events.append("memory")
        return room(host, like)

    def seen_mark(device: torch.device) -> Mark:
        events.append("mark")
        return mark(device)

    monkeypatch.setattr(HostStates, "_room", seen_room)
    monkeypatch.setattr("engine.compute.recurrent.recurrent_runner.mark", seen_mark)
    moves = BlockMoves(swap_out=(BlockCopy(0, 1),), states_out=(StateCopy(0, 1),))
    result = runner.run(replace(step, moves=moves))
    assert result.swap_bytes and result.swap_s > 0
    assert "memory" in events and "memory" not in events[events.index("mark") :]


@pytest.mark.by_default
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("family", SOME)
def test_forks_and_drafts_among_swaps_have_their_own_text(family: str, caching: bool) -> None:
    """Three choices of each of two prompts that begin alike, and one state on the host beside another."""
    apart, together = choices(), choices()
    serve(make_batcher(rewindable=Rewindable.DRAFTS), make_recurrent_runner(family), {0: apart})
    texts = [request.output_token_ids for request in apart]
    limits = {"prefix_caching": caching, "num_snapshots": 4 * caching, "num_host_states": 2}
    decoder, decisions = drafted(family, together, texts, **limits)
    inputs = [decision.inputs for decision in decisions if decision.inputs is not None]
    assert states_moved(decisions)[1] > 0
    assert caching or sum(len(each.moves.state_copies) for each in inputs) > 0, (
        "else a prompt's last token is alone"
    )
    assert decoder.stats.num_accepted > 0
    assert [request.output_token_ids for request in together] == texts


def choices() -> list[Request]:
    """They draw, so that the smallest difference shows."""
    found = []
    for place, prompt in enumerate(prompts()[:2]):
        for choice in range(3):
            name, parent = f"{place}.{choice}", f"{place}.0" if choice else None
            seed = 10 * place + choice
            found.append(
                make_request(
                    *(name, prompt),
                    arrival=seed,
                    max_tokens=NUM_TOKENS,
                    temperature=0.9,
                    seed=seed,
                    fork_of=parent,
                )
            )
    return found


def drafted(
    family: str, requests: Sequence[Request], texts: Sequence[list[int]], **limits: Any
) -> tuple[SpeculativeDecoder, list[BatchDecision]]:
    """Serve the requests with half of their drafts right, and too few blocks for all of them."""
    known = {
        request.request_id: [*request.token_ids, *text] for request, text in zip(requests, texts, strict=True)
    }
    drafter = HalfRight(known)
    config = SpeculationConfig(512, 6, length_policy="fixed", min_acceptance_rate=0.0)
    costs = PassCosts()
    decoder = SpeculativeDecoder(config, [DraftSource(drafter, 6)], make_length_policy(config, costs), costs)
    batcher = swapping(decoder=decoder, **limits)
    batcher.running.lookup.stops.least, batcher.running.lookup.stops.period = 4, 8
    num_snapshots = batcher.kv.snapshots.num_slots
    runner = make_recurrent_runner(family, num_blocks=13, num_snapshots=num_snapshots, host_room=HOST_ROOM)
    for request in requests:
        batcher.add(request)
    decisions = []
    while batcher.has_work:
        (link,) = decoder.links
        if jobs := link.jobs(ahead=False):
            link.take(read_answers(jobs, drafter.draft(jobs), 512))
        decisions.append(batcher.step())
        if (inputs := decisions[-1].inputs) is not None:
            batcher.commit(decisions[-1], runner.run(inputs).rows)
        batcher.kv.check_integrity()
    return decoder, decisions


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_hybrid"])
def test_room_on_the_host_comes_with_the_settings(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    flags = ["--max-model-len", "64", "--max-num-seqs", "4", "--swap-space", "1MiB", "--compile", "off"]
    parts = load_parts(load_settings([str(tmp_path), *flags], environ={}))
    host = parts.batcher.kv.host
    assert host.num_states is not None and host.num_states > 4 and host.num_blocks >= 4
    none = load_parts(load_settings([str(tmp_path), *flags, "--preemption", "recompute"], environ={}))
    assert (none.batcher.kv.host.num_blocks, none.batcher.kv.host.num_states) == (0, 0)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_hybrid"])
def test_requests_are_swapped_where_the_settings_say_so(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    flags = ["--max-model-len", "40", "--max-num-seqs", "4", "--kv-block-size", "4", "--compile", "off"]
    flags += ["--speculative-method", "none", "--no-prefix-caching", "--preemption", "swap"]
    found = []
    for num_blocks in ("64", "13"):
        settings = load_settings([str(tmp_path), *flags, "--num-kv-blocks", num_blocks], environ={})
        parts = load_parts(settings)
        assert isinstance(parts.runner, RecurrentRunner)
        requests, decisions = requests_of(), list[BatchDecision]()
        serve(parts.batcher, parts.runner, {0: requests}, decisions.append)
        found.append(([request.token_ids for request in requests], states_moved(decisions)))
    (alone, none), (swapped, (out, back)) = found
    assert none == (0, 0) and out == back > 0
    assert swapped == alone
