"""The CPU backend against the reference on noise: long contexts, odd shapes, any packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention import AttentionContext, CpuAttention, LayerCall, ReferenceAttention
from engine.compute.attention.key_bias import KeyBias
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.query_groups import group_sequences
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import StepInputs
from tests.support.examples import share_of
from tests.support.packed import random_kv

CPU = torch.device("cpu")
GROUPED = LayerKv(2, 16, 16)
Chunk = tuple[int, int]  # (tokens already computed, tokens of this step)


def make_step(chunks: Sequence[Chunk], block_size: int, seed: int = 0) -> tuple[StepInputs, int]:
    """A step of sequences over scattered blocks, and the number of blocks in the pool."""
    needed = [-(-(context + count) // block_size) for context, count in chunks]
    num_blocks = sum(needed) + 2
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    parts = [
        Part([7] * (context + count), context, context + count, [free.pop() for _ in range(blocks)])
        for (context, count), blocks in zip(chunks, needed, strict=True)
    ]
    return pack_step(parts, block_size), num_blocks


def attend_both(
    chunks: Sequence[Chunk],
    layer: LayerKv = GROUPED,
    *,
    heads_of_each: int = 3,
    block_size: int = 16,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
    bias: KeyBias | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same layer of the same step by the CPU backend and by the reference, over equal noise."""
    inputs, num_blocks = make_step(chunks, block_size)
    num_tokens = len(inputs.token_ids)
    results = []
    with torch.inference_mode():
        for backend in (CpuAttention(), ReferenceAttention()):
            generator = torch.Generator().manual_seed(1)
            kv = random_kv(KvTensors((layer,), num_blocks, block_size, dtype, CPU), generator)
            context = AttentionContext(inputs, kv, backend)
            shapes = [
                (num_tokens, layer.num_kv_heads * heads_of_each, layer.key_dim),
                (num_tokens, layer.num_kv_heads, layer.key_dim),
                (num_tokens, layer.num_kv_heads, layer.value_dim),
            ]
            query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            sinks = torch.randn(shapes[0][1], generator=generator) * 3 if has_sinks else None
            call = LayerCall(0, 0.3, layer.window, softcap, layer.chunk, sinks, bias)
            results.append(context.attend(query, key, value, call))
    return results[0], results[1]


def assert_equal(results: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, reference = results
    assert ours.shape == reference.shape
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-4)


MIXED: list[Chunk] = [(5, 1), (700, 1), (31, 1), (32, 1), (90, 4), (3, 4), (0, 70), (600, 150), (0, 1)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 24])
def test_a_mixed_step(block_size: int) -> None:
    assert_equal(attend_both(MIXED, block_size=block_size))


@pytest.mark.parametrize("window", [1, 2, 16, 33, 512, 5000])
def test_windows_of_every_size(window: int) -> None:
    assert_equal(attend_both(MIXED, LayerKv(2, 16, 16, window)))


@pytest.mark.parametrize("chunk", [1, 16, 33, 512, 5000])
def test_chunks_of_every_size(chunk: int) -> None:
    assert_equal(attend_both(MIXED, LayerKv(2, 16, 16, chunk=chunk)))


@pytest.mark.parametrize("layer", [GROUPED, LayerKv(2, 16, 16, 33), LayerKv(2, 16, 16, chunk=33)])
def test_sinks(layer: LayerKv) -> None:
    """Alone, beside a soft cap, and for the one decode that a fused call would take."""
    assert_equal(attend_both(MIXED, layer, has_sinks=True))
    assert_equal(attend_both(MIXED, layer, softcap=2.0, has_sinks=True))
    assert_equal(attend_both([(200, 1)], layer, has_sinks=True))


@pytest.mark.parametrize("layer", [GROUPED, LayerKv(2, 16, 16, 33)])
def test_biases_by_position(layer: LayerKv) -> None:
    """In groups, for the one decode that a fused call would take, and beside a soft cap and sinks."""
    bias = KeyBias(torch.tensor([0.5, 0.25, 0.1, -0.2, 0.0, 0.01]), scale=0.5)
    assert_equal(attend_both(MIXED, layer, bias=bias))
    assert_equal(attend_both([(200, 1)], layer, bias=bias))
    assert_equal(attend_both(MIXED, layer, softcap=2.0, has_sinks=True, bias=bias))
    plain, biased = attend_both(MIXED, layer)[0], attend_both(MIXED, layer, bias=bias)[0]
    assert not torch.allclose(plain, biased, atol=0.1)


@pytest.mark.parametrize("window", [None, 33])
def test_soft_caps(window: int | None) -> None:
    assert_equal(attend_both(MIXED, LayerKv(2, 16, 16, window), softcap=2.0))


@pytest.mark.parametrize(
    ("layer", "heads_of_each"),
    [
        (LayerKv(1, 16, 16), 1),
        (LayerKv(1, 8, 8), 9),
        (LayerKv(5, 24, 24), 1),
        (LayerKv(2, 24, 8), 2),
        (LayerKv(2, 8, 24), 2),
        (LayerKv(3, 7, 5), 3),
    ],
)
def test_head_shapes(layer: LayerKv, heads_of_each: int) -> None:
    assert_equal(attend_both(MIXED, layer, heads_of_each=heads_of_each))


def test_one_short_decode_alone() -> None:
    """The fused call, with and without a mask."""
    for context in (0, 14, 15, 16, 200):
        assert_equal(attend_both([(context, 1)]))
        assert_equal(attend_both([(context, 1)], LayerKv(2, 16, 16, 9)))
        assert_equal(attend_both([(context, 1)], softcap=3.0))


def test_many_decodes_of_very_different_lengths() -> None:
    lengths = np.random.default_rng(0).permutation([20 * (n % 7) + 900 * (n % 3 == 0) for n in range(80)])
    assert_equal(attend_both([(int(length), 1) for length in lengths]))


def test_a_long_chunk_after_a_long_context() -> None:
    assert_equal(attend_both([(700, 300)]))
    assert_equal(attend_both([(700, 300)], LayerKv(2, 16, 16, 100)))


def test_bfloat16_is_as_close_as_its_rounding() -> None:
    ours, reference = attend_both(MIXED, dtype=torch.bfloat16)
    assert (ours.float() - reference.float()).norm() < 0.01 * reference.float().norm()


def test_a_step_may_be_attended_again() -> None:
    """A plan holds no state of a pass: every layer, and every repetition, finds it as new."""
    inputs, num_blocks = make_step(MIXED, 16)
    layers = (LayerKv(2, 16, 16), LayerKv(1, 8, 8), LayerKv(2, 16, 16, 9))
    kv = KvTensors(layers, num_blocks, 16, torch.float32, CPU)
    context = AttentionContext(inputs, kv, CpuAttention())
    with torch.inference_mode():
        rounds: list[list[torch.Tensor]] = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(2)
            rounds.append([])
            for index, layer in enumerate(layers):
                shape = (len(inputs.token_ids), layer.num_kv_heads, layer.key_dim)
                query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
                rounds[-1].append(context.attend(query, key, value, LayerCall(index, 0.3, layer.window)))
    for first, second in zip(*rounds, strict=True):
        torch.testing.assert_close(first, second, atol=0, rtol=0)


@settings(max_examples=share_of(60), deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 150))),
        min_size=1,
        max_size=12,
    ),
    window=st.one_of(st.none(), st.integers(1, 100)),
    block_size=st.sampled_from([1, 4, 16]),
    softcap=st.one_of(st.none(), st.just(4.0)),
)
def test_any_packing(chunks: list[Chunk], window: int | None, block_size: int, softcap: float | None) -> None:
    assert_equal(attend_both(chunks, LayerKv(2, 8, 8, window), block_size=block_size, softcap=softcap))


@settings(max_examples=share_of(100), deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from([1, 1, 1, 2, 5, 33, 300])), min_size=1, max_size=80
    )
)
def test_every_token_is_in_one_group_and_padding_is_bounded(chunks: list[Chunk]) -> None:
    inputs, num_blocks = make_step(chunks, 16)
    kv = KvTensors((LayerKv(3, 64, 64),), num_blocks, 16, torch.bfloat16, CPU)
    groups = group_sequences(inputs, kv)
    num_tokens = len(inputs.token_ids)
    rows = [torch.arange(num_tokens + 1)[group.rows] for group in groups]
    written = [
        owned if group.targets is None else group.targets for group, owned in zip(groups, rows, strict=True)
    ]
    real = torch.cat(written)
    assert torch.equal(real[real < num_tokens].sort().values, torch.arange(num_tokens))
    for group, read, owned in zip(groups, rows, written, strict=True):
        assert len(owned) == group.num_sequences * group.query_len
        assert group.num_sequences == 1 or len(owned) <= 256
        assert torch.equal(read[owned < num_tokens], owned[owned < num_tokens])
    # Beside what one more group costs, harmonically.
    evenness = 1 + np.log(inputs.kv_lens.sum() / inputs.kv_lens.min())
    sequence_of = np.repeat(np.arange(len(chunks)), inputs.query_lens)
    for group, read in zip(groups, rows, strict=True):
        members = np.unique(sequence_of[read.numpy()])
        kv_lens = np.sort(inputs.kv_lens[members])
        padding = int((kv_lens[-1] - kv_lens).sum())
        assert padding <= 1366 * (1 + np.log(len(kv_lens)))
        repeated = group.query_len - inputs.query_lens[members]
        assert int((repeated * inputs.kv_lens[members]).sum()) <= 2 * 1366 * evenness
