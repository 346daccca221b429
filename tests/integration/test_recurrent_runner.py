"""The slot-state runner, step by step: pieces equal the whole, and what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import ModelSettings
from engine.compute.loading.loader import load_model
from engine.compute.recurrent import mixer_kinds, pass_rows
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part, plain_sampling
from engine.compute.runner.model_runner import ForDrafts
from engine.compute.runner.self_check import check_forward
from engine.errors import OutOfDeviceMemory, RewindError, UnsupportedModel
from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.step_records import BlockMoves, StepInputs
from tests.support.packed import random_schedule, random_tokens
from tests.support.recurrent import (
    load_recurrent,
    make_recurrent_runner,
    pack_slots,
    run_pieces,
    whole_logits,
    with_drafts,
)
from tests.support.tiny_models import RECURRENT_FAMILIES, save_tiny_model, tiny_model


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return random_tokens(np.random.default_rng(seed), length)


# --- loading ---


@pytest.mark.by_default("mamba", "granite_hybrid_moe", "qwen3_5_hybrid", "rwkv", "lfm2_hybrid")
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_every_family_is_loaded_and_can_take_drafts_back(family: str, tmp_path: Path) -> None:
    settings = ModelSettings(dtype="float32", device="cpu", max_model_len=200)
    loaded = load_model(save_tiny_model(family, tmp_path), settings)
    expected = tiny_model(family).state_dict()
    for name, weights in loaded.model.state_dict().items():
        assert torch.equal(weights, expected[name]), name
    assert loaded.rewindable is Rewindable.DRAFTS
    assert loaded.states == load_recurrent(family).states and len(loaded.states) == 2
    assert len(loaded.layers) == ("hybrid" in family)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (200, 512, frozenset({2}))


# --- numbers ---


@pytest.mark.by_default(
    *("mamba2", "bamba_hybrid", "qwen3_next_hybrid"),
    *("nemotron_h_hybrid", "granite_hybrid"),
)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_pieces_in_any_company_equal_the_whole(family: str) -> None:
    rng = np.random.default_rng(3)
    forward = RecurrentForward(load_recurrent(family))
    for _ in range(3):
        lengths = [90, 1, 23, 40, 7]
        sequences = {seat: random_tokens(rng, length) for seat, length in enumerate(lengths)}
        memory = StateMemory(forward, MemorySizes(num_blocks=23 * 5, block_size=4, num_slots=5))
        steps = random_schedule(rng, lengths, max_chunk=70)
        for seat, logits in run_pieces(forward, memory, sequences, steps).items():
            expected = whole_logits(family, sequences[seat])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_every_earlier_token_shows_in_the_last_logits(family: str) -> None:
    """Else the equalities of these tests would mean little."""
    tokens = tokens_of(12)
    last = whole_logits(family, tokens)[-1]
    for place in range(11):
        changed = [*tokens]
        changed[place] = tokens[place] + 1 if tokens[place] < 500 else 7
        assert (whole_logits(family, changed)[-1] - last).abs().max() > 1e-2, place


@pytest.mark.by_default(
    *("dtype0-mamba", "dtype1-granite_hybrid_moe", "dtype2-qwen3_5_hybrid"),
    *("dtype0-rwkv", "dtype1-lfm2_hybrid"),
)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_family_passes_the_self_check(family: str, dtype: torch.dtype) -> None:
    runner = make_recurrent_runner(family, dtype)
    check_forward(runner.forward)
    runner.warm_up()
    memory = (*runner.kv.tensors, *runner.states.rows.values(), *runner.states.state.values())
    assert not any(tensor.any() for tensor in memory)
    assert {tensor.dtype for tensor in runner.states.rows.values()} == {dtype}


@pytest.mark.parametrize("max_model_len", [1, 5, 13])
def test_the_check_keeps_to_the_models_context(max_model_len: int) -> None:
    runner = make_recurrent_runner("mamba2")
    runner.forward.loaded = replace(runner.forward.loaded, max_model_len=max_model_len)
    check_forward(runner.forward)
    runner.warm_up()


def forgets_the_state(scan: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*arguments: Any) -> Any:
        slots: LayerSlots = arguments[-1]
        slots.state.zero_()
        return scan(*arguments)

    return broken


def mixes_slots_up(scan: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*arguments: Any) -> Any:
        slots: LayerSlots = arguments[-1]
        slots.state.copy_(slots.state.roll(1, 0).clone())
        return scan(*arguments)

    return broken


def forgets_the_inputs(convolve: Callable[..., Any]) -> Callable[..., Any]:
    def broken(extended: torch.Tensor, conv: Any, slots: LayerSlots) -> Any:
        ours = torch.zeros(len(extended), 1)
        ours[slots.step.mixed] = 1.0
        return convolve(extended * ours, conv, slots)

    return broken


SCANS = ("selective_scan", "structured_scan", "delta_scan")


@pytest.mark.parametrize("family", ["mamba", "mamba2", "granite_hybrid", "qwen3_5_hybrid"])
@pytest.mark.parametrize(
    ("mutant", "module", "names"),
    [
        (forgets_the_state, mixer_kinds, SCANS),
        (mixes_slots_up, mixer_kinds, SCANS),
        (forgets_the_inputs, pass_rows, ("convolve",)),
    ],
)
def test_a_broken_recurrence_is_refused_at_start(
    family: str,
    mutant: Callable[[Any], Any],
    module: Any,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in names:
        monkeypatch.setattr(module, name, mutant(getattr(module, name)))
    with pytest.raises(UnsupportedModel, match=type(load_recurrent(family).model).__name__):
        check_forward(make_recurrent_runner(family).forward)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_outside_a_pass_the_model_is_transformers_own(family: str) -> None:
    make_recurrent_runner(family)
    model, tokens = load_recurrent(family).model, tokens_of(9)
    if load_recurrent(family).layers:
        model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert torch.equal(logits, whole_logits(family, tokens))


# --- steps ---


def part(tokens: list[int], first: int, stop: int, seat: int = 0) -> Part:
    return Part(tokens, first, stop, range(seat * 8, seat * 8 + 8))


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_step_may_want_no_logits(family: str) -> None:
    tokens = tokens_of(9)
    runner = make_recurrent_runner(family)
    inputs = pack_slots({2: part(tokens, 0, 6)})
    silent = replace(inputs, logits_rows=inputs.logits_rows[:0], sampling=plain_sampling(np.arange(0)))
    assert runner.run(silent).rows.token_ids == []
    rows = runner.run(pack_slots({2: part(tokens, 6, 9)})).rows
    assert rows.token_ids == [int(whole_logits(family, tokens)[-1].argmax())]


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_single_token_that_is_held_back_is_taken_in_once(family: str) -> None:
    """As the last of a prompt whose forks wait, where a chunk has just that one; beside a decode."""
    one, other = tokens_of(9, 1), tokens_of(9, 2)
    forward = RecurrentForward(load_recurrent(family))
    memory = StateMemory(forward, MemorySizes(num_blocks=16, block_size=4, num_slots=2, max_drafts=1))
    held = pack_slots({0: part(one, 6, 7, 0), 1: part(other, 4, 5, 1)})
    with torch.inference_mode():
        forward(pack_slots({0: part(one, 0, 6, 0), 1: part(other, 0, 4, 1)}), memory)
        forward(replace(held, held_back=(0,)), memory)
        found = forward(pack_slots({0: part(one, 7, 8, 0), 1: part(other, 5, 6, 1)}), memory)
    expected = [whole_logits(family, tokens)[-1] for tokens in (one[:8], other[:6])]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=5e-4)


def test_a_step_is_timed() -> None:
    result = make_recurrent_runner("mamba").run(pack_slots({0: part(tokens_of(5), 0, 5)}))
    assert 0 < result.forward_s < 10 and 0 < result.sample_s < 10
    assert (result.swap_s, result.swap_bytes) == (0.0, 0)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_state_that_is_not_finite_ends_its_own_row_and_is_gone_with_the_next_owner(family: str) -> None:
    runner = make_recurrent_runner(family)
    one, other = tokens_of(8, 1), tokens_of(8, 2)
    runner.run(pack_slots({0: part(one, 0, 4, 0), 1: part(other, 0, 4, 1)}))
    with torch.inference_mode():
        for state in (*runner.states.state.values(), *runner.states.rows.values()):
            state[0] = torch.nan
    rows = runner.run(pack_slots({0: part(one, 4, 5, 0), 1: part(other, 4, 5, 1)})).rows
    assert rows.row_errors is not None and set(rows.row_errors) == {0}
    assert rows.token_ids[1] == int(whole_logits(family, other[:5])[-1].argmax())
    inputs = pack_slots({0: part(one, 0, 6, 0)})
    scrub = BlockMoves(scrub_blocks=tuple(range(8)))  # as the scheduler asks
    rows = runner.run(replace(inputs, moves=scrub)).rows
    assert rows.row_errors is None
    assert rows.token_ids == [int(whole_logits(family, one[:6])[-1].argmax())]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("no room"), OutOfDeviceMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfDeviceMemory),
        (RuntimeError("a shape is wrong"), RuntimeError),
        (ValueError("anything else"), ValueError),
    ],
)
@pytest.mark.parametrize("family", ["mamba2", "granite_hybrid"])
def test_after_a_failed_step_its_sequences_begin_anew_and_others_go_on(
    family: str, raised: Exception, expected: type[Exception]
) -> None:
    runner = make_recurrent_runner(family)
    one, other = tokens_of(8, 1), tokens_of(8, 2)
    runner.run(pack_slots({0: part(one, 0, 4, 0), 1: part(other, 0, 5, 1)}))

    def fail(*_: object) -> None:
        raise raised

    hook = load_recurrent(family).model.register_forward_hook(fail)  # every layer has advanced by then
    with pytest.raises(expected) as caught:
        runner.run(pack_slots({0: part(one, 4, 5, 0)}))
    hook.remove()
    assert type(caught.value) is expected
    with pytest.raises(RewindError, match="slot 0 has seen 0 tokens"):
        runner.run(pack_slots({0: part(one, 4, 5, 0)}))
    rows = runner.run(pack_slots({1: part(other, 5, 6, 1), 0: part(one, 0, 5, 0)})).rows
    assert rows.token_ids == [
        int(whole_logits(family, tokens)[-1].argmax()) for tokens in (other[:6], one[:5])
    ]


def test_a_failed_draw_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_recurrent_runner("mamba2")
    tokens = tokens_of(6)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory):
        patch.setattr(runner._sampler, "sample", fail)
        runner.run(pack_slots({0: part(tokens, 0, 4)}))
    rows = runner.run(pack_slots({0: part(tokens, 0, 4)})).rows
    assert rows.token_ids == [int(whole_logits("mamba2", tokens[:4])[-1].argmax())]
    runner.run(pack_slots({0: part(tokens, 4, 5)}))
    with pytest.raises(RewindError, match="has seen 5 tokens"):
        runner.run(pack_slots({0: part(tokens, 4, 5)}))


def test_features_are_of_verified_positions_only() -> None:
    """A prompt keeps all its rows, a chain those of its accepted drafts: as one pass over all has them."""
    family = "qwen3_5_hybrid"
    tokens = tokens_of(3)
    for _ in range(2):
        tokens.append(int(whole_logits(family, tokens)[-1].argmax()))
    drafted = [*tokens, tokens[4] + 1]  # after the prompt's token one draft that is right, and another
    layers = (0, load_recurrent(family).config.num_hidden_layers)
    features = []
    for steps in ([pack_slots({0: part(tokens, 0, 5)})], _prompt_and_drafts(drafted)):
        runner = make_recurrent_runner(family, for_drafts=ForDrafts(feature_layers=layers))
        results = [runner.run(inputs) for inputs in steps]
        kept = [result.features[0] for result in results if result.features is not None]
        features.append(torch.cat([rows for rows in kept if isinstance(rows, torch.Tensor)]))
    assert features[0].shape == (5, 2 * 64)
    torch.testing.assert_close(features[1], features[0], rtol=1e-4, atol=1e-4)


def _prompt_and_drafts(tokens: list[int]) -> list[StepInputs]:
    return [pack_slots({0: part(tokens, 0, 3)}), with_drafts(pack_slots({0: part(tokens, 3, 6)}), [2])]
