"""Every family, computed packed, chunked and paged, gives what transformers' plain forward pass gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from engine.compute.attention import AttentionBackend, CpuAttention, ReferenceAttention
from tests.support.packed import (
    load_tiny,
    packed_forward,
    plain_logits,
    random_schedule,
    random_tokens,
    run_schedule,
)
from tests.support.tiny_models import FAMILIES, PECULIAR_FAMILIES, REBOUND_FAMILIES, WINDOW

BACKENDS = [pytest.param(CpuAttention(), id="cpu"), pytest.param(ReferenceAttention(), id="reference")]
BLOCK_SIZES = (4, 16)


def check(
    family: str,
    backend: AttentionBackend,
    block_size: int,
    lengths: Sequence[int],
    steps: Sequence[Sequence[tuple[int, int]]],
    seed: int = 0,
) -> None:
    """Fail unless the schedule gives every sequence the logits it has alone."""
    rng = np.random.default_rng(seed)
    loaded = load_tiny(family)
    sequences = [random_tokens(rng, length) for length in lengths]
    packed = run_schedule(packed_forward(loaded, backend), sequences, steps, block_size, rng)
    for tokens, logits in zip(sequences, packed, strict=True):
        torch.testing.assert_close(logits, plain_logits(loaded, tokens), atol=1e-4, rtol=1e-4)


def compositions(total: int) -> Iterator[list[int]]:
    """Every way to write `total` as an ordered sum."""
    if total == 0:
        yield []
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield [first, *rest]


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_prompt(family: str, block_size: int, backend: AttentionBackend) -> None:
    for length in (1, WINDOW, 4 * WINDOW + 3):
        check(family, backend, block_size, [length], [[(0, length)]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_longer_than_a_query_tile(family: str) -> None:
    check(family, CpuAttention(), 16, [200], [[(0, 200)]])
    check(family, CpuAttention(), 4, [230], [[(0, 50)], [(0, 180)]])


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_chunk_a_short_prompt(family: str, backend: AttentionBackend) -> None:
    """Each by its own sequence of the same tokens, all of them beside each other."""
    chunkings = list(compositions(6))
    rng = np.random.default_rng(3)
    loaded = load_tiny(family)
    tokens = random_tokens(rng, 6)
    expected = plain_logits(loaded, tokens)
    steps = [
        [(index, chunks[turn]) for index, chunks in enumerate(chunkings) if turn < len(chunks)]
        for turn in range(6)
    ]
    sequences = [tokens] * len(chunkings)
    for logits in run_schedule(packed_forward(loaded, backend), sequences, steps, 4, rng):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.by_default
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_chunks_far_beyond_the_window(family: str, block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    for seed in range(3):
        steps = random_schedule(rng, [6 * WINDOW], max_chunk=2 * WINDOW + 1)
        check(family, CpuAttention(), block_size, [6 * WINDOW], steps, seed)


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_sequences_in_mixed_steps(family: str, block_size: int, backend: AttentionBackend) -> None:
    lengths = [37, 9, 22, 5, 41, 16]
    steps = random_schedule(np.random.default_rng(block_size), lengths, max_chunk=14)
    check(family, backend, block_size, lengths, steps)


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_len", range(1, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_runs_of_several_tokens(family: str, query_len: int, backend: AttentionBackend) -> None:
    """As verification schedules them: the same few tokens of every sequence, at different lengths."""
    prompts = [3, 11, 19, 30]
    steps: list[list[tuple[int, int]]] = [list(enumerate(prompts))]
    steps += [[(index, query_len) for index in (2, 0, 3, 1)] for _ in range(2)]
    check(family, backend, 4, [prompt + 2 * query_len for prompt in prompts], steps)


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", PECULIAR_FAMILIES + REBOUND_FAMILIES)
def test_families_that_attend_in_a_way_of_their_own(family: str, backend: AttentionBackend) -> None:
    """Far beyond the window, in mixed steps; the forward pass to compare with is another instance's."""
    rng = np.random.default_rng(0)
    lengths = [37, 9, 5 * WINDOW + 3, 5]
    sequences = [random_tokens(rng, length) for length in lengths]
    expected = [plain_logits(load_tiny(family), tokens) for tokens in sequences]
    steps = random_schedule(rng, lengths, max_chunk=14)
    packed = run_schedule(packed_forward(load_tiny(family), backend), sequences, steps, 4, rng)
    for logits, plain in zip(packed, expected, strict=True):
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)


def test_shared_keys_and_values_are_kept_once() -> None:
    loaded = load_tiny("gemma3n")
    assert [layer.shares for layer in loaded.layers] == [None, None, 0, 1]
    kv = packed_forward(loaded, CpuAttention()).make_kv(3, 4)
    assert len(kv.tensors) == 4 and kv.keys[2] is kv.keys[0] and kv.values[3] is kv.values[1]
    assert kv.block_bytes == sum(tensor[0].nbytes for tensor in kv.tensors)


@pytest.mark.by_default
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", (*FAMILIES, "bloom", "codegen", "doge", "falcon_alibi"))
def test_half_precision_stays_within_its_rounding(family: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    loaded = load_tiny(family, dtype)
    lengths = [33, 12, 20]
    sequences = [random_tokens(rng, length) for length in lengths]
    steps = random_schedule(rng, lengths, max_chunk=9)
    for backend in (CpuAttention(), ReferenceAttention()):
        packed = run_schedule(packed_forward(loaded, backend), sequences, steps, 4, rng)
        for tokens, logits in zip(sequences, packed, strict=True):
            exact = plain_logits(load_tiny(family), tokens)
            plain = plain_logits(loaded, tokens).float()
            ours, theirs = (logits.float() - exact).norm(), (plain - exact).norm()
            assert ours <= 2 * theirs + 1e-3 * exact.norm()
