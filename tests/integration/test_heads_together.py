"""Heads that are normed together and rotated in one launch, in Triton's interpreter; `make test-triton`."""

from __future__ import annotations

import pytest
import torch

from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from tests.support.attention_noise import Chunk, scattered_step

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED, with_all_numbers  # noqa: E402

pytestmark = INTERPRETED

BLOCK_SIZE = 4
BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


@pytest.mark.parametrize("kept", [None, *BYTES.values()], ids=["plain", *BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("turned", "num_angles"), [(12, 12), (12, 6), (8, 8), (0, 0)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_heads_that_are_normed_together_are_rotated_as_if_they_had_been_before(
    kv_heads: int,
    turned: int,
    num_angles: int,
    dtype: torch.dtype,
    kept: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_all_numbers(monkeypatch)
    queries, keys, heads = 3 * 12, kv_heads * 12, 3 + 2 * kv_heads
    inputs, num_blocks = scattered_step([Chunk(3, 5), Chunk(9)], BLOCK_SIZE)
    count, layer = len(inputs.token_ids), LayerKv(kv_heads, 12, 12)
    ours, theirs = (
        KvTensors((layer,), num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"), kept) for _ in range(2)
    )
    angles = torch.rand(count, max(1, num_angles))
    turns = HeadTurns(angles.cos(), angles.sin(), turned) if turned else None
    norms = HeadNorms(torch.rand(queries).to(dtype), torch.rand(keys).to(dtype), 1e-5)
    qkv = torch.randn(count, heads * 12).to(dtype)
    qkv[2, queries + keys] = torch.inf  # of a value
    query, key, value = torch.split(qkv.clone(), [queries, keys, keys], dim=1)
    normed = (
        torch.nn.functional.rms_norm(query.float(), (queries,), norms.query.float(), 1e-5).to(dtype),
        torch.nn.functional.rms_norm(key.float(), (keys,), norms.key.float(), 1e-5).to(dtype),
        value,
    )
    found = backend().plan(inputs, ours).rotate_and_write(0, qkv, turns, norms)
    before = torch.cat(normed, dim=1)
    expected = backend().plan(inputs, theirs).rotate_and_write(0, before, turns, None)
    torch.testing.assert_close(found, expected)
    blocks = torch.arange(num_blocks)
    # A last bit before a number becomes a byte may be a step of these.
    atol, rtol = (None, None) if kept is None else (0.05, 0.13)
    for stored, wanted in zip(ours.read(0, blocks), theirs.read(0, blocks), strict=True):
        torch.testing.assert_close(stored, wanted, atol=atol, rtol=rtol, equal_nan=True)
    assert int(ours.read(0, blocks)[0].isnan().all(-1).sum()) == 1


def test_heads_that_are_normed_together_are_the_same_in_any_company() -> None:
    norms = HeadNorms(torch.rand(3 * 12), torch.rand(12), 1e-5)
    inputs, num_blocks = scattered_step([Chunk(3, 5), Chunk(9)], BLOCK_SIZE)
    alone, _ = scattered_step([Chunk(9)], BLOCK_SIZE)
    kv = KvTensors((LayerKv(1, 12, 12),), num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    qkv, angles = torch.randn(len(inputs.token_ids), 5 * 12), torch.rand(len(inputs.token_ids), 12)
    turns, last = HeadTurns(angles.cos(), angles.sin(), 12), HeadTurns(angles[5:].cos(), angles[5:].sin(), 12)
    found = backend().plan(inputs, kv).rotate_and_write(0, qkv.clone(), turns, norms)
    assert torch.equal(found[5:], backend().plan(alone, kv).rotate_and_write(0, qkv[5:], last, norms))
