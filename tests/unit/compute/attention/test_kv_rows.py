"""K/V of 8 bits: what a row becomes, where it lies, and that nothing else of a block has a say in it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.compute.attention.kv_rows import MOST_OF_BYTES, to_bytes
from engine.compute.attention.kv_tensors import KvTensors, bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.plan.step_records import BlockCopy

CPU = torch.device("cpu")
LAYER = LayerKv(3, 8, 12)
NUM_BLOCKS, BLOCK_SIZE = 4, 4
INT8, FP8 = torch.int8, torch.float8_e4m3fn
each_kind = pytest.mark.parametrize("kept", [INT8, FP8], ids=["int8", "fp8"])


def make_kv(kept: torch.dtype | None) -> KvTensors:
    return KvTensors((LAYER,), NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CPU, kept)


def noise(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, 3, dim) for dim in (LAYER.key_dim, LAYER.value_dim))
    key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return key, value


def write(kv: KvTensors, slots: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
    kv.write(0, kv.rows_of(torch.tensor(slots), 3), key, value)


def numbers_of_all_sizes() -> torch.Tensor:
    noise = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    return noise * torch.logspace(-8, 8, 50)[:, None]


def all_of(kept: torch.dtype) -> torch.Tensor:
    """Every number of the type, in order."""
    every = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(kept).float()
    return torch.tensor(sorted({number for number in every.tolist() if abs(number) <= MOST_OF_BYTES[kept]}))


@each_kind
def test_a_row_becomes_the_nearest_numbers_of_its_type(kept: torch.dtype) -> None:
    numbers = numbers_of_all_sizes()
    found, scales = to_bytes(numbers, kept)
    assert found.dtype is kept and (found.float().abs().amax(-1) == MOST_OF_BYTES[kept]).all()
    steps = {upper - lower for lower, upper in pairwise(all_of(kept).tolist())}
    assert len(steps) == (1 if kept is INT8 else 15)  # one step, or one for each exponent
    nearest = (numbers[..., None] / scales[:, None, None] - all_of(kept)).abs().amin(-1)
    distance = (numbers / scales[:, None] - found.float()).abs()
    torch.testing.assert_close(distance, nearest, rtol=0, atol=1e-3)


@each_kind
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_shows_it(wrong: float, kept: torch.dtype) -> None:
    numbers = torch.ones(2, 8)
    numbers[0, 3] = wrong
    found, scales = to_bytes(numbers, kept)
    assert not (found[0].float() * scales[0]).isfinite().all()
    assert (found[1].float() * scales[1]).tolist() == pytest.approx([1.0] * 8)


@each_kind
def test_zeros_and_next_to_nothing_are_zeros(kept: torch.dtype) -> None:
    for size in (0.0, 1e-40):
        found, scales = to_bytes(torch.full((1, 4), size), kept)
        assert not found.float().any() and scales.isfinite().all()


@each_kind
def test_a_block_costs_about_half(kept: torch.dtype) -> None:
    halves = [bytes_per_block((LayerKv(3, 64, 64),), 16, dtype) for dtype in (kept, torch.bfloat16)]
    assert halves[0] / halves[1] == pytest.approx(68 / 128)
    kv = make_kv(kept)
    assert sum(tensor.nbytes for tensor in kv.tensors) == NUM_BLOCKS * kv.block_bytes


@each_kind
def test_a_token_is_the_same_whatever_its_block_holds(kept: torch.dtype) -> None:
    """Written alone, among others, again after others, and moved from elsewhere."""
    key, value = noise(6)
    together, apart, again, moved = (make_kv(kept) for _ in range(4))
    write(together, [8, 9, 10, 11, 4, 5], key, value)
    for row, slot in enumerate([8, 9, 10, 11, 4, 5]):
        write(apart, [slot], key[row : row + 1], value[row : row + 1])
    write(again, [8, 9, 10, 11, 4, 5], *noise(6, seed=1))
    write(again, [5, 4, 11, 10, 9, 8], key.flip(0), value.flip(0))
    write(moved, [0, 1, 2, 3, 4, 5], key, value)
    moved.copy_blocks([BlockCopy(0, 2)])
    moved.scrub_blocks([0])
    for other in (apart, again, moved):
        assert all(map(torch.equal, other.tensors, together.tensors))
    tree = make_kv(kept)
    write(tree, [8, 15, 14, 13, 4, 5], key, value)
    sources, targets = torch.tensor([15, 14, 13]), torch.tensor([9, 10, 11])
    tree.move_rows(sources.numpy(), targets.numpy())
    tree.scrub_blocks([3])
    assert all(map(torch.equal, tree.tensors, together.tensors))


@each_kind
def test_both_ways_of_reading_give_what_was_written(kept: torch.dtype) -> None:
    key, value = noise(BLOCK_SIZE)
    kv, plain = make_kv(kept), make_kv(None)
    for each in (kv, plain):
        write(each, [8, 9, 10, 11], key, value)
    blocks = torch.tensor([2])
    for gathered, read, expected in zip(
        kv.gather(0, kv.head_index(blocks[None], 3)), kv.read(0, blocks), plain.read(0, blocks), strict=True
    ):
        assert torch.equal(gathered, read.flatten(0, 1).flatten(1))
        assert gathered.dtype is torch.bfloat16
        torch.testing.assert_close(read, expected, rtol=2**-7 if kept is INT8 else 2**-4, atol=0.02)
