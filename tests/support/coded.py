"""Coded weights of every kind for tests, of random codes in sizes that divide by nothing convenient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.compute.loading.coded_weights import (
    CodedWeight,
    CodeKind,
    InputRounding,
    float_codes,
    integer_codes,
    round_weights,
)

OUT, WIDTH = 70, 300
Make = Callable[[], CodedWeight]


def integers(group: int, bits: int = 4, *, zeros: bool = True, ordered: bool = False) -> CodedWeight:
    """Integers with a scale for each `group` inputs, those of a group apart from one another if `ordered`."""
    least, most = (-3, 13) if zeros and bits == 4 else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = torch.randint(least, most, (OUT, WIDTH)).float()
    scales = _spread(0.01 + torch.rand(OUT, -(-WIDTH // group)), group).half().float()
    order = torch.randperm(WIDTH) if ordered else None
    if order is not None:
        places = order.argsort()
        codes, scales = codes[:, places], scales[:, places]
    return known(integer_codes(codes, scales, order))


def floats(group: int, rows: int, rounding: InputRounding | None) -> CodedWeight:
    """Numbers of 8 bits with a scale for each `group` inputs of `rows` outputs; 0 is all of them."""
    codes = torch.randn(OUT, WIDTH).to(torch.float8_e4m3fn)
    group, rows = group or WIDTH, rows or OUT
    scales = 0.01 + torch.rand(-(-OUT // rows), -(-WIDTH // group))
    return known(float_codes(codes, _spread(scales, group).repeat_interleave(rows, 0)[:OUT], rounding))


def known(coded: CodedWeight | None) -> CodedWeight:
    """What must have been made."""
    assert coded is not None
    return coded


def _spread(scales: Tensor, group: int) -> Tensor:
    return scales.repeat_interleave(group, dim=1)[:, :WIDTH]


INTEGERS: dict[str, Make] = {
    "int4 in groups of 128": lambda: integers(128),
    "int4 in groups of 32": lambda: integers(32),
    "int4 without zero points": lambda: integers(128, zeros=False),
    "int4, a scale for each output": lambda: integers(WIDTH),
    "int4 by act-order": lambda: integers(128, ordered=True),
    "int8 in groups of 64": lambda: integers(64, bits=8),
    "int8 by act-order": lambda: integers(64, bits=8, ordered=True),
    "rounded to int4": lambda: round_weights(torch.randn(OUT, 320), CodeKind.INT4, 32),
    "rounded to int8": lambda: round_weights(torch.randn(OUT, 320), CodeKind.INT8, 32),
}
FLOATS: dict[str, Make] = {
    "fp8, a scale for all": lambda: floats(0, 0, None),
    "fp8 in blocks": lambda: floats(128, 32, None),
    "fp8 by rows": lambda: floats(0, 1, InputRounding()),
    "fp8 by a fixed scale": lambda: floats(0, 0, InputRounding(scale=torch.tensor([0.01]))),
    "fp8 by blocks": lambda: floats(128, 32, InputRounding(128)),
    "fp8 by blocks of 48": lambda: floats(48, 24, InputRounding(48)),
}
EVERY = INTEGERS | FLOATS


def moved(coded: CodedWeight, device: torch.device) -> CodedWeight:
    """The weight with all that it keeps on `device`."""

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    rounding = coded.rounding
    return replace(
        coded,
        codes=coded.codes.to(device),
        scales=coded.scales.to(device),
        zeros=there(coded.zeros),
        order=there(coded.order),
        rounding=None if rounding is None else rounding._replace(scale=there(rounding.scale)),
    )
