"""The benchmark of kernels: one product for what reads one input, and the same numbers from every side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bench.products import (
    Products,
    joined_weights,
    onednn_multiplies,
    packed_by_onednn,
    packed_by_us,
    plain,
)
from tests.support.native import compiled_kernels


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 8), nn.Linear(8, 4)
        self.k_proj, self.v_proj = nn.Linear(4, 2), nn.Linear(4, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)


def test_weights_that_read_one_input_are_joined() -> None:
    model = nn.Sequential(Attention(), Mlp(), nn.Linear(4, 9))
    assert [tuple(weight.shape) for weight in joined_weights(model)] == [(12, 4), (4, 8), (12, 4), (4, 6)]
    assert joined_weights(nn.Linear(4, 4)) == []


def test_a_pass_runs_each_product_once_and_the_head_on_few_rows() -> None:
    shapes: list[tuple[int, ...]] = []

    def make(weight: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda x: shapes.append((*x.shape, weight.shape[0]))

    products = Products([torch.zeros(6, 4), torch.zeros(4, 6)], torch.zeros(9, 4), make)
    assert products.step_s(num_rows=512, num_steps=2) > 0
    assert shapes == [(512, 4, 6), (512, 6, 4), (64, 4, 9)] * 3


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_side_computes_the_same(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 32).to(dtype), torch.randn(num_rows, 32).to(dtype)
    expected = (x.float() @ weight.float().T).to(dtype)
    sides = [plain(weight)]
    if dtype is torch.bfloat16:
        sides.append(packed_by_us(compiled_kernels())(weight))
    if onednn_multiplies(dtype):
        sides.append(packed_by_onednn(weight))
    for side in sides:
        torch.testing.assert_close(side(x), expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_onednn_packs_what_it_is_said_to_pack(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 32).to(dtype)
    if onednn_multiplies(dtype):
        assert packed_by_onednn(weight)(weight).shape == (64, 64)
    else:
        with pytest.raises((RuntimeError, AttributeError)):
            packed_by_onednn(weight)
