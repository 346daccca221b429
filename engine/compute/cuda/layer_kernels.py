"""The device code between a layer's matrix products, in Triton: norms, rotation, K/V, the gate of an MLP.

Each row is read once and written once, computed in float32. The norm is that of Zhang and Sennrich 2019, the
rotation that of Su et al. 2021 in halves, the gate one of Shazeer 2020 (SwiGLU, GEGLU).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.triton_activations import activated
from engine.compute.cuda.triton_pages import (
    as_bytes,
    inverse_of,
    is_sick,
    largest_of,
    row_start,
    scale_of,
    scale_pointers,
)


@triton.jit
def _normed(row, scale, eps, WIDTH):
    return row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps) * scale


@triton.jit
def _centred(row, mask, WIDTH):
    return tl.where(mask, row - tl.sum(row, 0) / WIDTH, 0.0)


@triton.jit
def norm_kernel(
    given,
    added,
    added_weight,
    weight,
    total,
    normed,
    multiplier,
    factor,
    added_eps,
    eps,
    HAS_ADDED: tl.constexpr,
    NORMS_ADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The norm of each row of `given` [rows, WIDTH], where HAS_NORM; grid (rows).

    With HAS_ADDED it is that of `given` + `multiplier` * `added`, which goes to `total`, rounded as it is
    stored, and again when it is multiplied with `factor`. With NORMS_ADDED what is added is normed before.
    With IS_CENTRED the mean of `given`, or of that sum, is taken off before it is normed (Ba et al. 2016).
    """
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(given + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)  # on its way beside the row
    if HAS_ADDED:
        more = tl.load(added + places, mask=mask, other=0.0).to(tl.float32)
        if NORMS_ADDED:
            added_scale = tl.load(added_weight + columns, mask=mask, other=0.0).to(tl.float32)
            more = _normed(more, added_scale, added_eps, WIDTH)
            more = more.to(total.dtype.element_ty).to(tl.float32)  # as by a norm of its own
        row += more * multiplier
        rounded = row.to(total.dtype.element_ty)
        rounded = (rounded.to(tl.float32) * factor).to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=mask)
        row = rounded.to(tl.float32)
    if HAS_NORM:
        if IS_CENTRED:
            row = _centred(row, mask, WIDTH)
        tl.store(normed + places, _normed(row, scale, eps, WIDTH).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def norm_heads_kernel(
    qkv,
    query_norm,
    key_norm,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Norm the first QUERIES of each row together, and the KEYS behind them; in place, grid (rows * 2).

    Rows of `qkv` are STRIDE numbers. What is normed is rounded as it is stored: as by a norm of its own.
    """
    first = (tl.program_id(0) // 2).to(tl.int64) * STRIDE
    is_key = tl.program_id(0) % 2 == 1
    weight = query_norm
    if is_key:
        weight = key_norm
    width = tl.where(is_key, KEYS, QUERIES)
    columns = tl.arange(0, PADDED)
    mask = columns < width
    places = qkv + first + tl.where(is_key, QUERIES, 0) + columns
    row = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, _normed(row, scale, eps, width).to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    gate_up,
    ups,
    gated,
    GATES_APART: tl.constexpr,
    UPS_APART: tl.constexpr,
    FIRST_UP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """ACTIVATION(gate) * up of rows of WIDTH; grid (rows * CHUNKS), CHUNK columns each.

    A row of `gate_up` takes GATES_APART numbers, one of `ups` UPS_APART, and FIRST_UP of these come before.
    """
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    columns = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * GATES_APART + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + row * UPS_APART + FIRST_UP + columns, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, 1.0, ACTIVATION) * up
    tl.store(gated + row * WIDTH + columns, result.to(gated.dtype.element_ty), mask=mask)


@triton.jit
def _store_halves(pages, place, halves, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """A row's halves to its `place`, (head counted through all blocks, offset)."""
    HALF: tl.constexpr = DIM // 2
    head, offset = place
    low, high = halves
    columns = tl.arange(0, low.shape[0])
    mask = columns < HALF
    target = pages + row_start(head, offset, DIM, BLOCK_SIZE, PAGES) + columns
    if PAGES == "plain":
        tl.store(target, low, mask=mask)
        tl.store(target + HALF, high, mask=mask)
    else:
        low_numbers, high_numbers = low.to(tl.float32), high.to(tl.float32)
        low_largest, high_largest = largest_of(low_numbers, 0), largest_of(high_numbers, 0)
        largest = tl.maximum(low_largest, high_largest) + (low_largest + high_largest) * 0.0
        inverse = inverse_of(largest, PAGES)
        tl.store(target, as_bytes(low_numbers, inverse, PAGES), mask=mask)
        tl.store(target + HALF, as_bytes(high_numbers, inverse, PAGES), mask=mask)
        tl.store(scale_pointers(pages, head, offset, DIM, BLOCK_SIZE), scale_of(largest, PAGES))


@triton.jit
def _turned(
    numbers,
    columns,
    mask,
    first,
    angles,
    norm,
    HAS_NORMS: tl.constexpr,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    OF_NEIGHBOURS: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """Some `numbers` of a head, normed, rotated with those they are paired with, read from `first` on."""
    cosines, sines = angles
    weight, shrink = norm
    HALF: tl.constexpr = TURNED // 2
    if OF_NEIGHBOURS:
        other = columns ^ 1
        is_lower = columns % 2 == 0
        angle = columns if IN_ORDER else columns // 2
    else:
        is_lower = columns < HALF
        other = tl.where(is_lower, columns + HALF, columns - HALF)
        angle = columns if ANGLES == TURNED else columns % HALF
    is_turned = mask & (columns < TURNED)
    partners = tl.load(first + other, mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORMS:
        partners = partners * shrink * tl.load(weight + other, mask=is_turned, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=is_turned, other=0.0).to(tl.float32)
    return numbers * cosine + tl.where(is_lower, -partners, partners) * sine


@triton.jit
def rotate_kernel(
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    query,
    keys,
    values,
    slots,
    eps,
    HAS_NORMS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    OF_NEIGHBOURS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """One head of one token, of rows [queries, keys, values]; grid (tokens * (heads + 2 * K/V heads)).

    Queries and keys are normed, where HAS_NORMS, and the first TURNED of their numbers rotated by `cosines`
    and `sines` [tokens, ANGLES] (see HeadTurns). With NORMS_VALUES values are normed, by no weight. Queries
    go to `query` [tokens, heads, DIM], keys and values to where `slots` says; slot -1 is no token's. There
    are none of a layer that reads another's.
    """
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    KV_HEADS: tl.constexpr = NUM_KV_HEADS if NUM_KV_HEADS else 1
    HALF: tl.constexpr = DIM // 2
    token = (tl.program_id(0) // ALL_HEADS).to(tl.int64)
    head = tl.program_id(0) % ALL_HEADS
    slot = tl.load(slots + token).to(tl.int64)
    if (head >= NUM_HEADS) & (slot < 0):
        return
    columns = tl.arange(0, PADDED_HALF)
    mask = columns < HALF
    source = qkv + (token * ALL_HEADS + head) * DIM + columns
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        weight = query_norm
        if head >= NUM_HEADS:
            weight = key_norm
        shrink = 1.0
        if HAS_NORMS:
            shrink = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
            low = low * shrink * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
            high = high * shrink * tl.load(weight + HALF + columns, mask=mask, other=0.0).to(tl.float32)
        if TURNED == DIM and not OF_NEIGHBOURS:
            angles = token * ANGLES + columns
            low_cosine = tl.load(cosines + angles, mask=mask, other=0.0).to(tl.float32)
            high_cosine = tl.load(cosines + angles + ANGLES - HALF, mask=mask, other=0.0).to(tl.float32)
            low_sine = tl.load(sines + angles, mask=mask, other=0.0).to(tl.float32)
            high_sine = tl.load(sines + angles + ANGLES - HALF, mask=mask, other=0.0).to(tl.float32)
            turned = low * low_cosine - high * low_sine
            high = high * high_cosine + low * high_sine
            low = turned
        elif TURNED:
            first = qkv + (token * ALL_HEADS + head) * DIM
            angles = cosines + token * ANGLES, sines + token * ANGLES
            norm = weight, shrink
            high_columns = HALF + columns
            low = _turned(
                low, columns, mask, first, angles, norm, HAS_NORMS, TURNED, ANGLES, OF_NEIGHBOURS, IN_ORDER
            )
            high = _turned(
                high,
                high_columns,
                mask,
                first,
                angles,
                norm,
                HAS_NORMS,
                TURNED,
                ANGLES,
                OF_NEIGHBOURS,
                IN_ORDER,
            )
    elif NORMS_VALUES:
        shrink = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
        low, high = low * shrink, high * shrink
    if head < NUM_HEADS:
        target = query + (token * NUM_HEADS + head) * DIM + columns
        tl.store(target, low.to(query.dtype.element_ty), mask=mask)
        tl.store(target + HALF, high.to(query.dtype.element_ty), mask=mask)
    else:
        is_key = head < NUM_HEADS + NUM_KV_HEADS
        pages = keys
        if head >= NUM_HEADS + NUM_KV_HEADS:
            pages = values
        value = source + tl.where(is_key, NUM_KV_HEADS * DIM, 0)
        value_low = tl.load(value, mask=mask, other=0.0).to(tl.float32)
        value_high = tl.load(value + HALF, mask=mask, other=0.0).to(tl.float32)
        sick = is_sick(largest_of(value_low, 0) + largest_of(value_high, 0))
        instead = tl.where(is_key, float("nan"), 0.0)
        low, high = tl.where(sick, instead, low), tl.where(sick, instead, high)
        kv_head = (head - NUM_HEADS) % KV_HEADS
        place = (slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_head, slot % BLOCK_SIZE
        # Rounded first: a layer that is not fused stores the same bytes.
        halves = low.to(query.dtype.element_ty), high.to(query.dtype.element_ty)
        _store_halves(pages, place, halves, DIM, BLOCK_SIZE, PAGES)


@triton.jit
def gated_norm_kernel(
    given,
    gates,
    weight,
    normed,
    eps,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
):
    """The norm of each GROUP of `given` [rows, WIDTH], gated before or after; grid (rows, groups).

    `gates` are [rows, WIDTH], STRIDE apart. A gate is silu(x), or sigmoid(x) where BY_SIGMOID.
    """
    places = tl.arange(0, PADDED)
    columns = tl.program_id(1) * GROUP + places
    mask = places < GROUP
    first = tl.program_id(0).to(tl.int64) * WIDTH
    gates += tl.program_id(0).to(tl.int64) * STRIDE
    row = tl.load(given + first + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if BY_SIGMOID else gate * tl.sigmoid(gate)
    if GATES_FIRST:
        row *= gate
    row *= tl.rsqrt(tl.sum(row * row, 0) / GROUP + eps) * scale
    if not GATES_FIRST:
        row *= gate
    tl.store(normed + first + columns, row.to(normed.dtype.element_ty), mask=mask)
