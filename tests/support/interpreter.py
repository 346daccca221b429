"""Triton's interpreter with the numbers of a GPU: it keeps those that numpy lacks as their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

_TORCH = {
    interpreter.tl.float32: torch.float32,
    interpreter.tl.float16: torch.float16,
    interpreter.tl.bfloat16: torch.bfloat16,
    interpreter.tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}

# The marks of a test that runs in it. numpy remarks where a GPU is silent: rows of padding end as 0 / 0 and
# mean nothing, as does a gate far from 0; Triton 3.6 uses what numpy 2.3 will not have.
INTERPRETED = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
WITH_GATES = [*INTERPRETED, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]


def with_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it multiply bfloat16, make it of integers, and round to the nearest even: torch's own rounding."""
    builder = interpreter.InterpreterBuilder
    create_dot, cast, convert = builder.create_dot, builder.cast_impl, interpreter._convert_float

    def is_bfloat16(kind: Any) -> bool:
        return bool(kind.scalar == interpreter.tl.bfloat16)

    def as_float32(handle: Any) -> Any:
        if not is_bfloat16(handle.dtype):
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, interpreter.tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if is_bfloat16(target) and source.dtype.scalar.is_int():
            source = interpreter.TensorHandle(source.data.astype(np.float32), interpreter.tl.float32)
        return cast(self, source, target)

    def convert_float(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in _TORCH or target not in _TORCH:
            return convert(numbers, source, target, rounding)
        given = torch.from_numpy(np.ascontiguousarray(numbers)).view(_TORCH[source])
        rounded = given.to(_TORCH[target])
        return rounded.view(torch.uint8).numpy().view(_BITS[rounded.itemsize]).reshape(numbers.shape)

    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def with_even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a row's products be the same in tiles of all sizes, as on a device.

    By numpy's float32 they are not on every CPU: its library sums in another order where there are more rows.
    In float64 the order shows in no bit that is left.
    """
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        if total.dtype.scalar != interpreter.tl.float32:
            return create_dot(self, a, b, total, *rest)
        wide = interpreter.TensorHandle(total.data.astype(np.float64), interpreter.tl.float64)
        found = create_dot(self, a, b, wide, *rest).data.astype(np.float32)
        return interpreter.TensorHandle(found, interpreter.tl.float32)

    monkeypatch.setattr(builder, "create_dot", dot)
