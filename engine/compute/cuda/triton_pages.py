"""The device code of what pages hold, in Triton: where a row lies, how it is read, and how it is rounded.

PAGES says what KvRows keeps: "plain" numbers, or bytes, each "int8" or "fp8", with a float32 for each row
that they are multiplied with, behind all rows of a head. A row's bytes follow from its own numbers alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

SCALE_BYTES = tl.constexpr(4)
LEAST = tl.constexpr(1e-30)  # as KvRows has it: a row whose largest is less counts as zeros
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has no fraction, rounded to the nearest even
# Of a product and that sum a compiler makes one operation, rounded once. The interpreter has no other way.
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


def pages_of(kept: torch.dtype) -> str:
    """PAGES for K/V that is kept in this type."""
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kept, "plain")


@triton.jit
def row_start(head, offset, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """Where the row at `offset` of `head`, counted through all blocks, begins in its tensor."""
    start = (head * BLOCK_SIZE + offset) * DIM
    if PAGES == "plain":
        return start
    return start + scales_before(head, BLOCK_SIZE)


@triton.jit
def scales_before(head, BLOCK_SIZE: tl.constexpr):
    """The bytes of all scales that lie before the rows of `head`."""
    return head * (BLOCK_SIZE * SCALE_BYTES)


@triton.jit
def scale_pointers(pages, head, offset, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where that row's scale is, in pages of bytes."""
    start = (head + 1) * (BLOCK_SIZE * DIM) + scales_before(head, BLOCK_SIZE) + offset * SCALE_BYTES
    return (pages + start).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def as_numbers(rows, TYPE: tl.constexpr, PAGES: tl.constexpr):
    """What was read, as numbers of TYPE, which has each number of a byte exactly; they are not scaled."""
    numbers = rows
    if PAGES == "fp8":
        numbers = rows.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif PAGES != "plain":
        numbers = rows.to(TYPE)
    return numbers  # the only one: all are compiled, taken or not, and are to have one type


@triton.jit
def largest_of(numbers, AXIS: tl.constexpr):
    """The largest size along AXIS; no number where one is not finite."""
    sizes = tl.abs(numbers)
    return tl.max(sizes, AXIS) + tl.sum(sizes * 0.0, AXIS)


@triton.jit
def scale_of(largest, PAGES: tl.constexpr):
    """What the bytes of a row with this largest number are multiplied with."""
    MOST: tl.constexpr = 127.0 if PAGES == "int8" else 448.0
    return tl.div_rn(largest, MOST)


@triton.jit
def inverse_of(largest, PAGES: tl.constexpr):
    """What a row with this largest number is multiplied with to become bytes; 0 where it has none."""
    MOST: tl.constexpr = 127.0 if PAGES == "int8" else 448.0
    has_some = largest > LEAST
    return tl.where(has_some, tl.div_rn(MOST, tl.where(has_some, largest, 1.0)), 0.0)


@triton.jit
def as_bytes(numbers, inverse, PAGES: tl.constexpr):
    """The bytes of `numbers` * `inverse`, as int8."""
    scaled = numbers * inverse
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if PAGES == "fp8":
        return scaled.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    whole = libdevice.rint(scaled) if _HAS_LIBDEVICE else scaled + WHOLE - WHOLE
    return whole.to(tl.int8)
