"""The runner: steps in, tokens out, and a model that is not served exactly never starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.attention import ATTENTION_NAME, AttentionContext, LayerCall
from engine.compute.attention.query_groups import QueryGroup
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step, plain_sampling
from engine.compute.runner.model_runner import ForDrafts, ModelRunner, rows_apart
from engine.compute.runner.self_check import check_forward
from engine.compute.sampling.sampler import Sampler
from engine.errors import OutOfDeviceMemory, UnsupportedModel
from engine.plan.speculation.draft_tape import NewFeatures
from engine.plan.step_records import BlockCopy, BlockMoves
from tests.support.packed import load_tiny, plain_logits, random_tokens
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE

BLOCK_SIZE = 4


def make_runner(
    family: str, dtype: torch.dtype = torch.float32, num_blocks: int = 32, num_host_blocks: int = 0
) -> ModelRunner:
    loaded = load_tiny(family, dtype)
    sampler = Sampler(loaded.vocab_size, loaded.device)
    return ModelRunner(loaded, num_blocks, BLOCK_SIZE, sampler, num_host_blocks)


def greedy(loaded: LoadedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(loaded, tokens)[-1].argmax()))
    return tokens


def test_generates_what_the_plain_model_generates() -> None:
    loaded = load_tiny("llama")
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, 9), random_tokens(rng, 2)]
    expected = [greedy(loaded, prompt, 6) for prompt in prompts]
    runner = make_runner("llama")
    sequences = [list(prompt) for prompt in prompts]
    blocks = ([7, 2, 30, 4], [5, 9, 1, 8])
    first = [0, 0]
    for _ in range(6):
        order = sorted((0, 1), key=lambda row: len(sequences[row]) - first[row])
        parts = [Part(sequences[row], first[row], len(sequences[row]), blocks[row]) for row in order]
        result = runner.run(pack_step(parts, BLOCK_SIZE))
        assert result.rows.row_errors is None
        for row, token in zip(order, result.rows.token_ids, strict=True):
            first[row] = len(sequences[row])
            sequences[row].append(token)
    assert sequences == expected


def test_times_what_it_does() -> None:
    runner = make_runner("llama")
    result = runner.run(pack_step([Part([5, 6, 7], 0, 3, [0])], BLOCK_SIZE))
    assert 0 < result.forward_s < 10
    assert 0 < result.sample_s < 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_may_want_no_logits(family: str) -> None:
    """A chunk that does not end its prompt."""
    loaded = load_tiny(family)
    tokens = random_tokens(np.random.default_rng(0), 9)
    expected = int(plain_logits(loaded, tokens)[-1].argmax())
    inputs = pack_step([Part(tokens, 0, 6, [3, 1])], BLOCK_SIZE)
    silent = replace(inputs, logits_rows=inputs.logits_rows[:0], sampling=plain_sampling(np.arange(0)))
    assert make_runner(family, torch.bfloat16).run(silent).rows.token_ids == []
    runner = make_runner(family)
    assert runner.run(silent).rows.token_ids == []
    rows = runner.run(pack_step([Part(tokens, 6, 9, [3, 1, 0])], BLOCK_SIZE)).rows
    assert rows.token_ids == [expected]


def test_a_row_that_is_not_finite_ends_alone() -> None:
    runner = make_runner("llama")
    tokens = random_tokens(np.random.default_rng(0), 8)
    runner.run(pack_step([Part(tokens, 0, 4, [0]), Part(tokens, 0, 4, [1])], BLOCK_SIZE))
    with torch.inference_mode():
        runner.kv.values[0][0] = torch.nan
    rows = runner.run(pack_step([Part(tokens, 4, 5, [0, 2]), Part(tokens, 4, 5, [1, 3])], BLOCK_SIZE)).rows
    assert rows.row_errors is not None and set(rows.row_errors) == {0}
    assert 0 <= rows.token_ids[1] < VOCAB_SIZE


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("no room"), OutOfDeviceMemory),
        (MemoryError("no room"), OutOfDeviceMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfDeviceMemory),
        (RuntimeError("a shape is wrong"), RuntimeError),
        (ValueError("anything else"), ValueError),
    ],
)
def test_an_error_of_the_pass_comes_through_and_the_next_step_runs(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("llama")
    inputs = pack_step([Part([5, 6, 7], 0, 3, [0])], BLOCK_SIZE)
    tokens = runner.run(inputs).rows.token_ids

    def fail(*_: object) -> None:
        raise raised

    with monkeypatch.context() as patch, pytest.raises(expected) as caught:
        patch.setattr(AttentionContext, "attend", fail)
        runner.run(inputs)
    assert type(caught.value) is expected
    assert runner.run(inputs).rows.token_ids == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_touches_no_block_and_the_warm_up_needs_none(family: str) -> None:
    runner = make_runner(family)  # with fewer blocks than a warm-up fills
    check_forward(runner.forward)
    runner.warm_up()
    assert not any(tensor.any() for tensor in (*runner.kv.keys, *runner.kv.values))


# --- moving blocks ---


def copies(sources: list[int], targets: list[int]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(*pair) for pair in zip(sources, targets, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_was_swapped_out_goes_on_in_other_blocks(family: str, dtype: torch.dtype) -> None:
    tokens, other = (random_tokens(np.random.default_rng(seed), 14) for seed in (0, 1))
    stay, leave = (make_runner(family, dtype, num_host_blocks=8) for _ in range(2))
    for runner in (stay, leave):
        runner.run(pack_step([Part(tokens, 0, 11, [3, 1, 8])], BLOCK_SIZE))
    expected = stay.run(pack_step([Part(tokens, 11, 14, [3, 1, 8, 5])], BLOCK_SIZE)).rows
    # The very step that swaps the blocks out gives them to somebody else.
    inputs = pack_step([Part(other, 0, 12, [1, 8, 3])], BLOCK_SIZE)
    moves = BlockMoves(swap_out=copies([3, 1, 8], [6, 7, 2]), scrub_blocks=(1,))
    result = leave.run(replace(inputs, moves=moves))
    assert 0 < result.swap_s < 10
    assert result.swap_bytes == 3 * leave.kv.block_bytes
    inputs = pack_step([Part(tokens, 11, 14, [9, 8, 0, 4])], BLOCK_SIZE)
    moves = BlockMoves(swap_in=copies([6, 7, 2], [9, 8, 0]), scrub_blocks=(9, 0))
    result = leave.run(replace(inputs, moves=moves))
    assert result.swap_bytes == 3 * leave.kv.block_bytes
    assert result.rows == expected


def test_nothing_is_measured_and_no_host_memory_taken_without_a_swap() -> None:
    runner = make_runner("llama", num_host_blocks=1 << 40)
    result = runner.run(pack_step([Part([5, 6, 7], 0, 3, [0])], BLOCK_SIZE))
    assert (result.swap_s, result.swap_bytes, runner.swap.reserved_bytes) == (0.0, 0, 0)


def test_values_that_are_not_finite_stay_with_their_owner_through_a_swap() -> None:
    """Swap out, scrub, copy, swap in, in this order: the new owner of a poisoned block reads zeros."""
    runner = make_runner("llama", num_host_blocks=4)
    tokens = random_tokens(np.random.default_rng(0), 9)
    expected = make_runner("llama").run(pack_step([Part(tokens, 0, 5, [0, 1])], BLOCK_SIZE)).rows
    runner.run(pack_step([Part(tokens, 0, 7, [0, 1])], BLOCK_SIZE))
    with torch.inference_mode():
        for tensor in runner.kv.tensors:
            tensor[[0, 1]] = torch.nan
    inputs = pack_step([Part(tokens, 0, 5, [0, 1])], BLOCK_SIZE)
    moves = BlockMoves(swap_out=copies([0, 1], [2, 3]), scrub_blocks=(0, 1))
    result = runner.run(replace(inputs, moves=moves))
    assert result.rows == expected
    inputs = pack_step([Part(tokens, 5, 6, [0, 1]), Part(tokens, 7, 8, [7, 5])], BLOCK_SIZE)
    moves = BlockMoves(swap_in=copies([2, 3], [7, 5]), scrub_blocks=(7, 5))
    result = runner.run(replace(inputs, moves=moves))
    assert result.rows.row_errors is not None and set(result.rows.row_errors) == {1}


def test_a_copied_block_may_be_scrubbed_first_and_its_source_swapped_out() -> None:
    runner = make_runner("llama", num_host_blocks=4)
    tokens = random_tokens(np.random.default_rng(0), 9)
    runner.run(pack_step([Part(tokens, 0, 6, [0, 1])], BLOCK_SIZE))
    expected = runner.run(pack_step([Part(tokens, 6, 7, [0, 1])], BLOCK_SIZE)).rows
    inputs = pack_step([Part(tokens, 6, 7, [0, 2])], BLOCK_SIZE)
    moves = BlockMoves(swap_out=copies([2], [3]), scrub_blocks=(2,), block_copies=(BlockCopy(1, 2),))
    assert runner.run(replace(inputs, moves=moves)).rows == expected


# --- the self-check ---


@pytest.mark.by_default
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_self_check(family: str, dtype: torch.dtype) -> None:
    runner = make_runner(family, dtype)
    check_forward(runner.forward)
    assert load_tiny(family, dtype).model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("max_model_len", [1, 5, 13])
def test_the_check_keeps_to_the_models_context(max_model_len: int) -> None:
    loaded = replace(load_tiny("gpt2"), max_model_len=max_model_len)
    runner = ModelRunner(loaded, 8, BLOCK_SIZE, Sampler(loaded.vocab_size, loaded.device))
    check_forward(runner.forward)
    runner.warm_up()


Attend = Callable[..., torch.Tensor]


def wrong_scale(attend: Attend) -> Attend:
    return lambda self, query, key, value, call: attend(self, query * 2, key, value, call)


def swapped_heads(attend: Attend) -> Attend:
    return lambda self, query, key, value, call: attend(self, query.flip(1), key, value, call)


def blind_to_the_past(attend: Attend) -> Attend:
    def broken(
        self: AttentionContext,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: LayerCall,
    ) -> torch.Tensor:
        return attend(self, query, key, value, call._replace(window=1))

    return broken


def written_elsewhere(attend: Attend) -> Attend:
    return lambda self, query, key, value, call: attend(self, query, key.roll(1, 0), value.roll(1, 0), call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mutant", [wrong_scale, swapped_heads, blind_to_the_past, written_elsewhere])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_broken_attention_is_refused_at_start(
    family: str, mutant: Callable[[Attend], Attend], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(family, dtype)
    monkeypatch.setattr(AttentionContext, "attend", mutant(AttentionContext.attend))
    with pytest.raises(UnsupportedModel, match=type(load_tiny(family).model).__name__):
        check_forward(runner.forward)
    assert load_tiny(family, dtype).model.config._attn_implementation == ATTENTION_NAME


def test_a_lost_mask_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryGroup, "_mask", lambda *_: None)
    with pytest.raises(UnsupportedModel):
        check_forward(make_runner("llama").forward)


def test_logits_that_are_not_numbers_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(self: AttentionContext, query: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full_like(query, torch.nan)

    monkeypatch.setattr(AttentionContext, "attend", poisoned)
    with pytest.raises(UnsupportedModel, match="nan"):
        check_forward(make_runner("llama").forward)


@torch.inference_mode()
def test_features_are_of_verified_positions_only() -> None:
    """A part of a prompt keeps all its rows, a chain or a tree those of its accepted branch."""
    loaded = load_tiny("llama")
    for_drafts = ForDrafts(keeps_features=True, feature_layers=(0, 1))
    said = greedy(loaded, [5, 6, 7], 3)
    runner = ModelRunner(loaded, 32, BLOCK_SIZE, Sampler(loaded.vocab_size, loaded.device), 0, for_drafts)
    wrong = said[4] + 1
    runner.run(pack_step([Part(said, 0, 2, [0, 1]), Part(said, 0, 2, [2, 3])], BLOCK_SIZE))
    chain = Part([*said[:5], wrong], 2, 6, [0, 1], (-1, 0, 1))
    tree = Part([*said[:3], wrong, said[3]], 2, 5, [2, 3], (-1, -1))
    parts = [Part([9] * 8, 0, 8, [4, 5]), chain, tree]
    inputs = pack_step(parts, BLOCK_SIZE)
    result = runner.run(inputs)
    assert result.features is not None
    kept = [features for features in result.features if isinstance(features, torch.Tensor)]
    assert [len(features) for features in kept] == [8, 1 + 2, 1 + 1]
    _, hidden = runner.forward.with_features(inputs, runner.kv)
    expected = torch.cat([hidden[:8], hidden[8:11], hidden[12:13], hidden[14:15]])
    torch.testing.assert_close(torch.cat(kept), expected)


@torch.inference_mode()
def test_kept_features_hold_nothing_of_what_passed_beside_them() -> None:
    """They may be kept for hundreds of steps until the sequence is drafted for again."""
    loaded = load_tiny("llama")
    for_drafts = ForDrafts(keeps_features=True, feature_layers=(0, 1), feature_window=70)
    runner = ModelRunner(loaded, 64, BLOCK_SIZE, Sampler(loaded.vocab_size, loaded.device), 0, for_drafts)
    decode = Part([5, 6, 7], 2, 3, [0, 1])
    prompt = Part([9] * 100, 0, 100, range(2, 27))
    result = runner.run(pack_step([decode, decode._replace(blocks=[27, 28]), prompt], BLOCK_SIZE))
    assert result.features is not None
    first, second, long = (rows for rows in result.features if isinstance(rows, torch.Tensor))
    row_bytes = first.nbytes
    assert (len(first), len(second), len(long)) == (1, 1, 70), "of a long part the window is enough"
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == row_bytes
    assert long.untyped_storage().nbytes() == 70 * row_bytes
    _, hidden = runner.forward.with_features(pack_step([prompt], BLOCK_SIZE), runner.kv)
    torch.testing.assert_close(long, hidden[30:])


@pytest.mark.parametrize("window", [16, 70])
def test_sequences_hold_no_more_features_than_are_set_aside(window: int) -> None:
    """At worst: what a drafter read of a prompt, then drafts that all came, then as many steps as it sees."""
    loaded = load_tiny("llama")
    for_drafts = ForDrafts("match", True, (0, 1), window)
    width = 2 * loaded.config.hidden_size
    sequences = [NewFeatures(window) for _ in range(3)]
    last = 0

    def pass_through(num_rows: int, num_refused: int = 0) -> None:
        nonlocal last
        last += num_rows - num_refused
        lens = np.full(len(sequences), num_rows, np.int32)
        parts = rows_apart(torch.zeros(len(sequences) * num_rows, width), lens, window)
        for sequence, rows in zip(sequences, parts, strict=True):
            sequence.add(last, rows[: num_rows - num_refused], num_rows)

    def held() -> int:
        runs = [run[1] for each in sequences for run in each._runs]
        runs += [each._given.hidden for each in sequences if each._given]
        storages = [rows.untyped_storage() for rows in runs if isinstance(rows, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    most = for_drafts.held_bytes(loaded, len(sequences), max_drafts=63)
    pass_through(200)
    for sequence in sequences:
        sequence.take()
    for num_rows in (64, *[1] * 300):
        pass_through(num_rows)
        assert held() <= most
        if last == 200 + 64 + window - 1:
            assert held() == most
    for _ in range(100):
        pass_through(33, num_refused=32)
        assert held() <= most, "the rows of refused drafts are there, too"
    for sequence in sequences[1:]:
        sequence.clear()
    assert held() <= most // len(sequences), "and none that others have let go of"
    assert ForDrafts().held_bytes(loaded, 3, 63) == 0


def test_heads_that_read_no_layers_hold_two_steps() -> None:
    loaded = load_tiny("llama")
    held = ForDrafts(keeps_features=True).held_bytes(loaded, 3, max_drafts=7)
    assert held == 2 * 3 * (1 + 7) * 4 * loaded.config.hidden_size
