"""Functions of every number, and products, round a row alike, alone and among many."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compute import steady_numbers
from engine.compute.steady_numbers import alike, in_blocks, is_steady, rows_of_a_block, steady_product

FUNCTIONS = {"softplus": F.softplus, "sigmoid": torch.sigmoid, "SiLU": F.silu, "GELU": F.gelu}


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 3), (40, 48), (9, 5, 7), (37, 1001), (90, 1024)])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_row_has_the_same_bits_in_any_company(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype, num_threads: int
) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(num_threads)).to(dtype)
    apart = torch.cat((rows, rows), dim=-1).chunk(2, dim=-1)[0]  # as the halves of a projection lie
    whole = alike(function, rows)
    torch.testing.assert_close(whole, function(rows))
    assert whole.shape == rows.shape and torch.equal(alike(function, apart), whole)
    for first, stop in ((0, 1), (1, 3), (len(rows) - 4, len(rows))):
        assert torch.equal(alike(function, rows[first:stop]), whole[first:stop])


def test_of_no_rows_there_is_nothing() -> None:
    assert alike(F.softplus, torch.empty(0, 5)).shape == (0, 5)


def of_many(rows: Tensor) -> Tensor:
    """A product that rounds a row by how many there are, on any machine."""
    return rows @ torch.ones(rows.shape[-1], 3, dtype=rows.dtype) * (1 + rows.shape[-2] / 100)


@pytest.mark.parametrize("shape", [(40, 6), (2, 21, 6), (1, 3, 16, 6)])
def test_a_row_has_its_product_in_any_company(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole, count = in_blocks(of_many, rows), shape[-2]
    torch.testing.assert_close(
        whole, rows.sum(-1, keepdim=True).expand(*shape[:-1], 3) * (1 + rows_of_a_block() / 100)
    )
    for first, stop in ((0, 1), (1, 3), (3, 12), (count - 4, count)):
        assert torch.equal(in_blocks(of_many, rows[..., first:stop, :]), whole[..., first:stop, :])


def test_of_no_rows_there_is_no_product_and_what_is_steady_is_multiplied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_steady(torch.float32)
    monkeypatch.setattr(steady_numbers, "is_steady", lambda dtype: dtype is torch.bfloat16)
    assert in_blocks(of_many, torch.empty(2, 0, 6)).shape == (2, 0, 3)
    rows = torch.ones(40, 6, dtype=torch.bfloat16)
    assert torch.equal(in_blocks(of_many, rows), of_many(rows))


@pytest.mark.parametrize("outputs", [1, 3, 64, 1024])
@pytest.mark.parametrize("inputs", [32, 160, 2048])
def test_so_it_has_of_torchs_products(inputs: int, outputs: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(num_threads)
    rows, weight = (torch.randn(count, inputs, generator=generator) for count in (40, outputs))
    whole = steady_product(rows, weight)
    torch.testing.assert_close(whole, F.linear(rows, weight), rtol=1e-4, atol=1e-4)
    for first, stop in ((0, 1), (1, 3), (3, 20), (36, 40)):
        assert torch.equal(steady_product(rows[first:stop], weight), whole[first:stop])


def test_a_block_has_as_many_rows_as_are_multiplied_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(rows: Tensor, weight: Tensor) -> Tensor:
        """Rounds the last of eight rows otherwise."""
        product = rows.double() @ weight.double().T
        product[7:8] *= 1 + 1e-3 * (len(rows) == 8)
        return product.float()

    rows_of_a_block.cache_clear()
    try:
        monkeypatch.setattr(F, "linear", linear)
        assert rows_of_a_block() == 16
    finally:
        rows_of_a_block.cache_clear()
