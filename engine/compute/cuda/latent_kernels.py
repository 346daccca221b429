"""The device code around latent attention, in Triton: what is stored of a token, and what queries end with.

After DeepSeek-V2 (DeepSeek-AI 2024, 2.1): of a token one row is kept, normed numbers that keys and values of
all heads are made of, and rotated ones that all keys share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.layer_kernels import _normed
from engine.compute.cuda.triton_pages import (
    as_bytes,
    inverse_of,
    is_sick,
    largest_of,
    row_start,
    scale_of,
    scale_pointers,
)

# How numbers are paired to be rotated: not at all, a number of each half, or neighbours, which then lie in
# halves, or stay neighbours.
APART, HALVES, NEIGHBOURS_TO_HALVES, NEIGHBOURS = range(4)
_HALVES = tl.constexpr(HALVES)
_TO_HALVES = tl.constexpr(NEIGHBOURS_TO_HALVES)
_APART = tl.constexpr(APART)


@triton.jit
def _turned(source, columns, cosines, sines, STEP: tl.constexpr, COUNT: tl.constexpr, ORDER: tl.constexpr):
    """COUNT numbers from `source` on in float32, rotated as ORDER says; `columns` say which of the results.

    Angles lie STEP apart.
    """
    HALF: tl.constexpr = COUNT // 2
    mask = columns < COUNT
    if ORDER == _APART:
        turned = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        if ORDER == _HALVES:
            is_lower = columns < HALF
            own, other, angle = columns, tl.where(is_lower, columns + HALF, columns - HALF), columns
        elif ORDER == _TO_HALVES:
            is_lower = columns < HALF
            angle = tl.where(is_lower, columns, columns - HALF)
            own = 2 * angle + tl.where(is_lower, 0, 1)
            other = own ^ 1
        else:
            is_lower = columns % 2 == 0
            own, other, angle = columns, columns ^ 1, columns // 2
        numbers = tl.load(source + own, mask=mask, other=0.0).to(tl.float32)
        partners = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + angle * STEP, mask=mask, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle * STEP, mask=mask, other=0.0).to(tl.float32)
        turned = numbers * cosine + tl.where(is_lower, -partners, partners) * sine
    return turned


@triton.jit
def _row_normed(source, weight, columns, eps, COUNT: tl.constexpr):
    """The norm of COUNT numbers from `source` on, by `weight`, in float32."""
    mask = columns < COUNT
    row = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    return _normed(row, scale, eps, COUNT)


@triton.jit
def latent_kernel(
    given,
    query_weight,
    latent_weight,
    cosines,
    sines,
    normed,
    pages,
    slots,
    query_eps,
    latent_eps,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    ANGLES: tl.constexpr,
    STEP: tl.constexpr,
    ORDER: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    PADDED_QUERIES: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Store the latent row of a token, or norm what its queries are made of; grid (2 * tokens).

    A row of `given`, STRIDE apart, has QUERIES numbers, then RANK to be normed and ROTATED to be rotated by
    `cosines` and `sines`, whose rows lie ANGLES apart. These two go to where `slots` says in `pages`, none at
    slot -1. With HAS_QUERIES the first become `normed` [tokens, QUERIES].
    """
    token = (tl.program_id(0) // 2).to(tl.int64)
    source = given + token * STRIDE
    if tl.program_id(0) % 2 == 0:
        if HAS_QUERIES:
            columns = tl.arange(0, PADDED_QUERIES)
            row = _row_normed(source, query_weight, columns, query_eps, QUERIES)
            tl.store(
                normed + token * QUERIES + columns, row.to(normed.dtype.element_ty), mask=columns < QUERIES
            )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            kind: tl.constexpr = given.dtype.element_ty
            columns, rest = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROTATED)
            latent = _row_normed(source + QUERIES, latent_weight, columns, latent_eps, RANK).to(kind)
            angles = token * ANGLES
            turned = _turned(
                source + QUERIES + RANK, rest, cosines + angles, sines + angles, STEP, ROTATED, ORDER
            )
            turned = turned.to(kind)
            sick = is_sick(largest_of(latent.to(tl.float32), 0))
            latent = tl.where(sick, 0.0, latent).to(kind)
            turned = tl.where(sick, float("nan"), turned).to(kind)
            DIM: tl.constexpr = RANK + ROTATED
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            target = pages + row_start(block, offset, DIM, BLOCK_SIZE, PAGES)
            is_latent, is_rest = columns < RANK, rest < ROTATED
            if PAGES == "plain":
                tl.store(target + columns, latent, mask=is_latent)
                tl.store(target + RANK + rest, turned, mask=is_rest)
            else:
                numbers, others = latent.to(tl.float32), tl.where(is_rest, turned.to(tl.float32), 0.0)
                first, second = largest_of(numbers, 0), largest_of(others, 0)
                largest = tl.maximum(first, second) + (first + second) * 0.0
                inverse = inverse_of(largest, PAGES)
                tl.store(target + columns, as_bytes(numbers, inverse, PAGES), mask=is_latent)
                tl.store(target + RANK + rest, as_bytes(others, inverse, PAGES), mask=is_rest)
                tl.store(scale_pointers(pages, block, offset, DIM, BLOCK_SIZE), scale_of(largest, PAGES))


@triton.jit
def query_rest_kernel(
    given,
    cosines,
    sines,
    query,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    ANGLES: tl.constexpr,
    STEP: tl.constexpr,
    ORDER: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
):
    """The end of a head's query, rotated; grid (tokens * HEADS).

    Rows of `given`, STRIDE apart, have PLAIN and ROTATED numbers of each head; of `query` [tokens, HEADS,
    RANK + ROTATED] the latter are written.
    """
    token, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    columns = tl.arange(0, PADDED_ROTATED)
    source = given + token * STRIDE + head * (PLAIN + ROTATED) + PLAIN
    angles = token * ANGLES
    turned = _turned(source, columns, cosines + angles, sines + angles, STEP, ROTATED, ORDER)
    target = query + (token * HEADS + head) * (RANK + ROTATED) + RANK + columns
    tl.store(target, turned.to(query.dtype.element_ty), mask=columns < ROTATED)
