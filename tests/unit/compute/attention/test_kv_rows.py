"""K/V of 8 bits: what a row becomes, where it lies, and that nothing else of a block has a say in it."""

from __future__ import annotations

import pytest
import torch

from engine.compute.attention.kv_rows import to_int8
from engine.compute.attention.kv_tensors import KvTensors, bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.plan.step_records import BlockCopy

CPU = torch.device("cpu")
LAYER = LayerKv(3, 8, 12)
NUM_BLOCKS, BLOCK_SIZE = 4, 4


def make_kv(kept: torch.dtype | None = torch.int8) -> KvTensors:
    return KvTensors((LAYER,), NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CPU, kept)


def noise(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, 3, dim) for dim in (LAYER.key_dim, LAYER.value_dim))
    key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return key, value


def write(kv: KvTensors, slots: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
    kv.write(0, kv.rows_of(torch.tensor(slots), 3), key, value)


def test_a_row_is_within_half_a_step_of_its_numbers() -> None:
    numbers = (
        torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 50)[:, None]
    )
    integers, scales = to_int8(numbers)
    assert integers.dtype is torch.int8 and int(integers.abs().amax(-1).min()) == 127
    assert ((integers * scales[:, None] - numbers).abs() <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_shows_it(wrong: float) -> None:
    numbers = torch.ones(2, 8)
    numbers[0, 3] = wrong
    integers, scales = to_int8(numbers)
    assert not (integers[0] * scales[0]).isfinite().all()
    assert (integers[1] * scales[1]).tolist() == pytest.approx([1.0] * 8)


def test_zeros_and_next_to_nothing_are_zeros() -> None:
    for size in (0.0, 1e-40):
        integers, scales = to_int8(torch.full((1, 4), size))
        assert not integers.any() and scales.isfinite().all()


def test_a_block_costs_about_half() -> None:
    halves = [bytes_per_block((LayerKv(3, 64, 64),), 16, dtype) for dtype in (torch.int8, torch.bfloat16)]
    assert halves[0] / halves[1] == pytest.approx(68 / 128)
    kv = make_kv()
    assert sum(tensor.nbytes for tensor in kv.tensors) == NUM_BLOCKS * kv.block_bytes


def test_a_token_is_the_same_whatever_its_block_holds() -> None:
    """Written alone, among others, again after others, and moved from elsewhere."""
    key, value = noise(6)
    together, apart, again, moved = (make_kv() for _ in range(4))
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
    tree = make_kv()
    write(tree, [8, 15, 14, 13, 4, 5], key, value)
    sources, targets = torch.tensor([15, 14, 13]), torch.tensor([9, 10, 11])
    tree.move_rows(sources.numpy(), targets.numpy())
    tree.scrub_blocks([3])
    assert all(map(torch.equal, tree.tensors, together.tensors))


def test_both_ways_of_reading_give_what_was_written() -> None:
    key, value = noise(BLOCK_SIZE)
    kv, plain = make_kv(), make_kv(None)
    for each in (kv, plain):
        write(each, [8, 9, 10, 11], key, value)
    blocks = torch.tensor([2])
    for gathered, read, expected in zip(
        kv.gather(0, kv.head_index(blocks[None], 3)), kv.read(0, blocks), plain.read(0, blocks), strict=True
    ):
        assert torch.equal(gathered, read.flatten(0, 1).flatten(1))
        assert gathered.dtype is torch.bfloat16
        torch.testing.assert_close(read, expected, rtol=2**-7, atol=0.02)
