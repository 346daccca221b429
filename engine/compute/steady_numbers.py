"""alike, in_blocks and steady_product: what is made of rows, where torch would round one by its company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_GRAIN = 32_768  # numbers that torch gives a thread at least
_VECTORS = 64  # numbers; a multiple of what any CPU's loop takes at once
_ROWS = (8, 16, 32)  # of one product, as few as will do: a decode alone pays for as many
_MANY, _INPUTS, _OUTPUTS = (16, 40), 512, 128  # heads and rows: a product as of latent attention
_TRIED = ((32, 1), (32, 3), (160, 2), (160, 3), (2048, 64))  # inputs and outputs


def alike(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What `function` makes of each number of `rows`, of any shape; a number is rounded alike wherever it is.

    On a CPU torch computes numbers by vectors and the last few of each thread by other code, which rounds
    exponentials otherwise (softplus, sigmoid and SiLU in float32), and GELU of rows that lie apart by other
    code still. Here numbers lie side by side, and no thread has any that fill no vector.
    """
    if rows.device.type != "cpu":
        return function(rows)
    count = rows.numel()
    num_threads = min(torch.get_num_threads(), max(1, -(-count // _GRAIN)))
    spare = -count % (_VECTORS * num_threads)
    if not spare:
        return function(rows.contiguous())
    return function(F.pad(rows.reshape(-1), (0, spare)))[:count].view(rows.shape)


def in_blocks(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What a product `multiply` makes of `rows`, [.., N, inputs]: [.., N, outputs], each row's bits its own.

    On a CPU torch adds up the products of float32 in an order that depends on how many rows there are. Here
    there are always as many, of which none has its bits by its place; their inputs should be a multiple of
    four, or it may. In fewer bits another library multiplies, which differs by company on some processors.
    """
    if rows.device.type != "cpu" or is_steady(rows.dtype):
        return multiply(rows)
    count, size = rows.shape[-2], rows_of_a_block()
    blocks = torch.split(F.pad(rows, (0, 0, 0, -count % size)), size, dim=-2)
    return torch.cat([multiply(block) for block in blocks], dim=-2)[..., :count, :]


@cache
def is_steady(dtype: torch.dtype) -> bool:
    """Whether torch multiplies a row of this type alike in any company, as it computes on this machine.

    Of bfloat16 it does not on Intel's processors with AMX.
    """
    if dtype is torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(*_MANY, _INPUTS, generator=generator).to(dtype)
    weights = torch.randn(_MANY[0], _INPUTS, _OUTPUTS, generator=generator).to(dtype)
    whole = rows @ weights
    parts = ((0, 1), (1, 3), (3, 20), (36, 40))
    return all(torch.equal(rows[:, a:b] @ weights, whole[:, a:b]) for a, b in parts)


@cache
def rows_of_a_block() -> int:
    """The fewest rows that torch multiplies alike at any place among them, as it computes on this machine.

    Eight by two or three outputs it does not on Intel's processors with AMX.
    """
    return next((count for count in _ROWS if _are_alike(count)), _ROWS[-1])


def _are_alike(count: int) -> bool:
    """Whether none of so many rows has its bits by its place, of the products that are tried."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in _TRIED:
        rows, weight = (torch.randn(each, inputs, generator=generator) for each in (count, outputs))
        whole = F.linear(rows, weight)
        for shift in range(1, count):
            if not torch.equal(F.linear(rows.roll(shift, 0), weight), whole.roll(shift, 0)):
                return False
    return True


def steady_product(rows: Tensor, weight: Tensor) -> Tensor:
    """As F.linear, by `in_blocks`."""
    return in_blocks(lambda block: F.linear(block, weight), rows)
