"""A function of every number rounds a row alike, alone and among many, whatever threads share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compute.steady_numbers import alike

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
