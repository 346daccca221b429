"""The device code of what pages hold, in Triton: where a row lies, how it is read, rounded and stored.

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


@triton.jit
def is_sick(largest):
    """Whether one of the numbers whose `largest_of` it is is not finite.

    A value that has one is kept as zeros, and its key as NaN: so it shows in the tokens that see it, and in
    no other, where a weight of nothing times NaN would be NaN. A refused draft must change nothing.
    """
    return largest != largest


@triton.jit
def _store_token(
    new,
    token_stride,
    head_stride,
    tensor,
    token,
    slot,
    sick,
    ZEROS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """One token's rows [heads, DIM] to where `slot` is in [blocks, heads, BLOCK_SIZE, DIM].

    Those of heads that are `sick` [HEADS] have ZEROS zeros, and no numbers behind them.
    """
    heads, dims = tl.arange(0, HEADS), tl.arange(0, PADDED)[None, :]
    is_head = heads < NUM_KV_HEADS
    mask = is_head[:, None] & (dims < DIM)
    sources = new + token * token_stride + heads.to(tl.int64)[:, None] * head_stride + dims
    head, offset = (slot // BLOCK_SIZE) * NUM_KV_HEADS + heads, slot % BLOCK_SIZE
    targets = tensor + row_start(head, offset, DIM, BLOCK_SIZE, PAGES)[:, None] + dims
    rows = tl.load(sources, mask=mask, other=0.0)
    instead = tl.where(dims < ZEROS, 0.0, float("nan"))
    rows = tl.where(sick[:, None], instead, rows).to(rows.dtype)
    if PAGES == "plain":
        tl.store(targets, rows, mask=mask)
    else:
        rows = rows.to(tl.float32)
        largest = largest_of(rows, 1)
        tl.store(targets, as_bytes(rows, inverse_of(largest, PAGES)[:, None], PAGES), mask=mask)
        scales = scale_pointers(tensor, head, offset, DIM, BLOCK_SIZE)
        tl.store(scales, scale_of(largest, PAGES), mask=is_head)


@triton.jit
def store_kernel(
    key,
    value,
    keys,
    values,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Store the key and value of every head of one token; grid (tokens). Slot -1 is no token.

    With VALUE_IN_KEY the value is the first numbers of the key, which alone is stored.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED_VALUE_DIM)[None, :]
    sources = value + token * value_token_stride + heads.to(tl.int64) * value_head_stride + dims
    mask = (heads < NUM_KV_HEADS) & (dims < VALUE_DIM)
    sick = is_sick(largest_of(tl.load(sources, mask=mask, other=0.0).to(tl.float32), 1))
    ZEROS: tl.constexpr = VALUE_DIM if VALUE_IN_KEY else 0
    _store_token(
        key,
        key_token_stride,
        key_head_stride,
        keys,
        token,
        slot,
        sick,
        ZEROS,
        NUM_KV_HEADS,
        KEY_DIM,
        PADDED_KEY_DIM,
        BLOCK_SIZE,
        HEADS,
        PAGES,
    )
    if not VALUE_IN_KEY:
        _store_token(
            value,
            value_token_stride,
            value_head_stride,
            values,
            token,
            slot,
            sick,
            VALUE_DIM,
            NUM_KV_HEADS,
            VALUE_DIM,
            PADDED_VALUE_DIM,
            BLOCK_SIZE,
            HEADS,
            PAGES,
        )
