"""Swapping: what comes back is what went out, wherever it lay meanwhile, and unused room costs nothing."""

from __future__ import annotations

import random

import pytest
import torch

from engine.compute.attention import swap_tensors
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.swap_tensors import SwapTensors
from engine.plan.step_records import BlockCopy

LAYERS = (LayerKv(2, 8, 8), LayerKv(1, 4, 6, window=8), LayerKv(3, 8, 2))
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 20


def make_kv(dtype: torch.dtype = torch.float32) -> KvTensors:
    """Tensors in which no two numbers are equal, but for rounding."""
    kv = KvTensors(LAYERS, NUM_BLOCKS, 4, dtype, torch.device("cpu"))
    for tensor in kv.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    return kv


@pytest.fixture(params=["one piece", "many pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make segments and batches of a few blocks, or the usual ones."""
    if request.param == "many pieces":
        block_bytes = make_kv().block_bytes
        monkeypatch.setattr(swap_tensors, "_SEGMENT_BYTES", 3 * block_bytes)
        monkeypatch.setattr(swap_tensors, "_STAGING_BYTES", 4 * block_bytes)


def test_bytes_come_back_as_they_were() -> None:
    """They mean floats, which few operations take."""
    layers = (LayerKv(2, 8, 8), LayerKv(1, 4, 8))
    kv = KvTensors(layers, 6, 4, torch.float32, torch.device("cpu"), torch.float8_e4m3fn)
    for tensor in kv.tensors:
        tensor.random_(-128, 128)
    before = [tensor[3].clone() for tensor in kv.tensors]
    swap = SwapTensors(kv, 2)
    swap.reserve([1])
    swap.copy_out([BlockCopy(3, 1)])
    kv.scrub_blocks([3])
    assert not any(tensor[3].any() for tensor in kv.tensors)
    swap.copy_in([BlockCopy(1, 5)])
    assert swap.reserved_bytes == 2 * kv.block_bytes
    for tensor, was in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor[5], was)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_is_what_went_out(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    for _ in range(20):
        kv = make_kv(dtype)
        before = [tensor.clone() for tensor in kv.tensors]
        swap = SwapTensors(kv, NUM_HOST_BLOCKS)
        count = draw.randint(1, NUM_BLOCKS)
        sources = draw.sample(range(NUM_BLOCKS), count)
        hosts = sorted(draw.sample(range(NUM_HOST_BLOCKS), count), reverse=draw.random() < 0.3)
        targets = draw.sample(range(NUM_BLOCKS), count)
        swap.reserve(hosts)
        swap.copy_out([BlockCopy(*pair) for pair in zip(sources, hosts, strict=True)])
        for tensor in kv.tensors:
            tensor.fill_(torch.nan)
        swap.copy_in([BlockCopy(*pair) for pair in zip(hosts, targets, strict=True)])
        for tensor, whole in zip(kv.tensors, before, strict=True):
            assert torch.equal(tensor[targets], whole[sources])
            others = [block for block in range(NUM_BLOCKS) if block not in targets]
            assert tensor[others].isnan().all(), "a block nobody asked for was written"


@pytest.mark.usefixtures("pieces")
def test_a_host_block_keeps_its_content_until_it_is_written_again() -> None:
    kv = make_kv()
    swap = SwapTensors(kv, NUM_HOST_BLOCKS)
    everything = range(NUM_BLOCKS)
    swap.reserve(everything)
    swap.copy_out([BlockCopy(block, block) for block in everything])
    swap.copy_out([BlockCopy(0, 5), BlockCopy(1, 6)])
    before = [tensor.clone() for tensor in kv.tensors]
    for _ in range(2):
        swap.copy_in([BlockCopy(5, 9), BlockCopy(4, 10), BlockCopy(6, 11)])
        for tensor, whole in zip(kv.tensors, before, strict=True):
            assert torch.equal(tensor[[9, 10, 11]], whole[[0, 4, 1]])


def test_room_is_taken_by_segments_when_first_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv()
    monkeypatch.setattr(swap_tensors, "_SEGMENT_BYTES", 8 * kv.block_bytes)
    swap = SwapTensors(kv, NUM_HOST_BLOCKS)
    assert swap.reserved_bytes == 0
    swap.reserve([9, 10])
    assert swap.reserved_bytes == 8 * kv.block_bytes
    swap.reserve([15])
    assert swap.reserved_bytes == 8 * kv.block_bytes
    swap.reserve([19])
    assert swap.reserved_bytes == 12 * kv.block_bytes, "the last segment is only as large as needed"
    swap.reserve(range(NUM_HOST_BLOCKS))
    assert swap.reserved_bytes == NUM_HOST_BLOCKS * kv.block_bytes
    with pytest.raises(AssertionError, match="none of the 20"):
        swap.reserve([NUM_HOST_BLOCKS + 4])


def test_nothing_to_move_is_nothing_done() -> None:
    swap = SwapTensors(make_kv(), 0)
    swap.reserve([])
    swap.copy_out([])
    swap.copy_in([])
    assert swap.reserved_bytes == 0
