"""The paged tensors: where a slot is, what moves with a block, what a block costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.attention.kv_tensors import KvTensors, bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.plan.step_records import BlockCopy

LAYERS = (LayerKv(2, 8, 8), LayerKv(1, 4, 6, window=8), LayerKv(3, 8, 2))
NUM_BLOCKS, BLOCK_SIZE = 6, 4
CPU = torch.device("cpu")


@pytest.fixture
def kv() -> KvTensors:
    return KvTensors(LAYERS, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)


def fill(kv: KvTensors) -> list[torch.Tensor]:
    """Give every block its own number in every tensor; the copies taken before a change."""
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.arange(1.0, NUM_BLOCKS + 1)[:, None, None, None].expand_as(tensor))
    return [tensor.clone() for tensor in (*kv.keys, *kv.values)]


def test_starts_as_zeros_of_each_layers_shape(kv: KvTensors) -> None:
    assert [tuple(keys.shape) for keys in kv.keys] == [(6, 2, 4, 8), (6, 1, 4, 4), (6, 3, 4, 8)]
    assert [tuple(values.shape) for values in kv.values] == [(6, 2, 4, 8), (6, 1, 4, 6), (6, 3, 4, 2)]
    assert not any(tensor.any() for tensor in (*kv.keys, *kv.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_costs_what_its_tensors_take(dtype: torch.dtype) -> None:
    kv = KvTensors(LAYERS, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
    taken = sum(tensor.numel() * tensor.element_size() for tensor in (*kv.keys, *kv.values))
    assert bytes_per_block(LAYERS, BLOCK_SIZE, dtype) * NUM_BLOCKS == taken


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_writes_each_token_to_its_slot(kv: KvTensors, layer: int) -> None:
    shape = LAYERS[layer]
    slots = torch.tensor([5, 23, 0, 6])
    key = torch.randn(4, shape.num_kv_heads, shape.key_dim)
    value = torch.randn(4, shape.num_kv_heads, shape.value_dim)
    kv.write(layer, kv.rows_of(slots, shape.num_kv_heads), key, value)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        torch.testing.assert_close(kv.keys[layer][block, :, offset], key[row], rtol=0, atol=0)
        torch.testing.assert_close(kv.values[layer][block, :, offset], value[row], rtol=0, atol=0)
    assert int(kv.keys[layer].any(-1).sum()) == 4 * shape.num_kv_heads  # and nowhere else
    others = [tensor for index in range(3) if index != layer for tensor in (kv.keys[index], kv.values[index])]
    assert not any(tensor.any() for tensor in others)


def test_gathers_each_heads_positions_as_one_run(kv: KvTensors) -> None:
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn_like(tensor))
    for blocks in (torch.tensor([[4, 1]]), torch.tensor([[3, 0, 5], [2, 2, 1]]), torch.tensor([[5], [4]])):
        for layer, shape in enumerate(LAYERS):
            keys, values = kv.gather(layer, kv.head_index(blocks, shape.num_kv_heads))
            rows = blocks.shape[0] * shape.num_kv_heads
            expected_keys = kv.keys[layer][blocks].transpose(1, 2).reshape(rows, -1, shape.key_dim)
            expected_values = kv.values[layer][blocks].transpose(1, 2).reshape(rows, -1, shape.value_dim)
            torch.testing.assert_close(keys.view(rows, -1, shape.key_dim), expected_keys, rtol=0, atol=0)
            torch.testing.assert_close(
                values.view(rows, -1, shape.value_dim), expected_values, rtol=0, atol=0
            )


def test_copies_whole_blocks_in_every_layer(kv: KvTensors) -> None:
    before = fill(kv)
    kv.copy_blocks([BlockCopy(1, 4), BlockCopy(1, 5)])
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        torch.testing.assert_close(tensor[[4, 5]], old[[1, 1]], rtol=0, atol=0)
        torch.testing.assert_close(tensor[:4], old[:4], rtol=0, atol=0)


def test_reads_all_sources_before_it_writes_a_target(kv: KvTensors) -> None:
    before = fill(kv)
    kv.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2)])
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        torch.testing.assert_close(tensor[[1, 2]], old[[0, 1]], rtol=0, atol=0)


def test_moves_single_slots_in_every_layer(kv: KvTensors) -> None:
    for tensor in kv.tensors:
        tensor.copy_(torch.randn_like(tensor))
    before = [by_slot(tensor).clone() for tensor in kv.tensors]
    kv.move_rows(np.array([9, 10, 3]), np.array([8, 9, 22]))  # a row may be a source and a target
    for tensor, old in zip(kv.tensors, before, strict=True):
        old[[8, 9, 22]] = old[[9, 10, 3]]
        torch.testing.assert_close(by_slot(tensor), old, rtol=0, atol=0)


def by_slot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).flatten(0, 1)  # [slots, kv heads, dim]


def test_scrubs_only_the_blocks_it_is_given(kv: KvTensors) -> None:
    before = fill(kv)
    for tensor in (*kv.keys, *kv.values):
        tensor[2] = torch.nan
        tensor[5] = torch.inf
    kv.scrub_blocks([5, 2])
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert not tensor[[2, 5]].any()
        torch.testing.assert_close(tensor[[0, 1, 3, 4]], old[[0, 1, 3, 4]], rtol=0, atol=0)


def test_nothing_to_move_moves_nothing(kv: KvTensors) -> None:
    before = fill(kv)
    kv.copy_blocks([])
    kv.scrub_blocks([])
    kv.move_rows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0)
