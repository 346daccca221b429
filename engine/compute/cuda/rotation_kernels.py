"""The device code between a layer's first product and attention, in Triton: norms of heads, rotation, K/V.

All is computed in float32 and written once. The rotation is that of Su et al. 2021.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def _paired(
    columns,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    OF_NEIGHBOURS: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """What each of some columns is turned with, whether it is the first of the two, and by which angle."""
    HALF: tl.constexpr = TURNED // 2
    if OF_NEIGHBOURS:
        other = columns ^ 1
        is_lower = columns % 2 == 0
        angle = columns if IN_ORDER else columns // 2
    else:
        is_lower = columns < HALF
        other = tl.where(is_lower, columns + HALF, columns - HALF)
        angle = columns if ANGLES == TURNED else columns % HALF
    return other, is_lower, angle


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
    other, is_lower, angle = _paired(columns, TURNED, ANGLES, OF_NEIGHBOURS, IN_ORDER)
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
def _rows_turned(
    rows,
    weight,
    eps,
    cosines,
    sines,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    OF_NEIGHBOURS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """A token's HEADS at `rows`, normed together and rotated: [PADDED_HEADS, PADDED_DIM] in float32.

    In between they are rounded as they would be stored: as by a norm of its own.
    """
    TYPE: tl.constexpr = rows.dtype.element_ty
    heads, columns = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < HEADS) & (columns < DIM)
    places = heads * DIM + columns
    row = tl.load(rows + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    shrink = tl.rsqrt(tl.sum(tl.sum(row * row, 1), 0) / (HEADS * DIM) + eps)
    row = (row * shrink * scale).to(TYPE).to(tl.float32)
    if TURNED:
        other, is_lower, angle = _paired(columns, TURNED, ANGLES, OF_NEIGHBOURS, IN_ORDER)
        is_turned = mask & (columns < TURNED)
        places = heads * DIM + other
        partners = tl.load(rows + places, mask=is_turned, other=0.0).to(tl.float32)
        scale = tl.load(weight + places, mask=is_turned, other=0.0).to(tl.float32)
        partners = (partners * shrink * scale).to(TYPE).to(tl.float32)
        cosine = tl.load(cosines + angle, mask=columns < TURNED, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=columns < TURNED, other=0.0).to(tl.float32)
        row = row * cosine + tl.where(is_lower, -partners, partners) * sine
    return row


@triton.jit
def _store_heads(
    pages,
    slot,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """A token's `rows` [PADDED_HEADS, PADDED_DIM] to where `slot` is in [blocks, HEADS, BLOCK_SIZE, DIM]."""
    heads, columns = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < HEADS)[:, None] & (columns < DIM)
    head, offset = (slot // BLOCK_SIZE) * HEADS + heads, slot % BLOCK_SIZE
    targets = pages + row_start(head, offset, DIM, BLOCK_SIZE, PAGES)[:, None] + columns
    if PAGES == "plain":
        tl.store(targets, rows, mask=mask)
    else:
        numbers = rows.to(tl.float32)
        largest = largest_of(numbers, 1)
        tl.store(targets, as_bytes(numbers, inverse_of(largest, PAGES)[:, None], PAGES), mask=mask)
        scales = scale_pointers(pages, head, offset, DIM, BLOCK_SIZE)
        tl.store(scales, scale_of(largest, PAGES), mask=heads < HEADS)


@triton.jit
def rotate_rows_kernel(
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    OF_NEIGHBOURS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """As `rotate_kernel`, of a token's queries that are normed together, or its keys; grid (tokens * 2).

    Values go with keys.
    """
    token = (tl.program_id(0) // 2).to(tl.int64)
    rows = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * DIM)
    cosines += token * ANGLES
    sines += token * ANGLES
    if tl.program_id(0) % 2 == 0:
        turned = _rows_turned(
            rows,
            query_norm,
            eps,
            cosines,
            sines,
            NUM_HEADS,
            DIM,
            TURNED,
            ANGLES,
            OF_NEIGHBOURS,
            IN_ORDER,
            PADDED_HEADS,
            PADDED_DIM,
        )
        heads, columns = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
        targets = query + token * (NUM_HEADS * DIM) + heads * DIM + columns
        tl.store(targets, turned.to(query.dtype.element_ty), mask=(heads < NUM_HEADS) & (columns < DIM))
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            rows += NUM_HEADS * DIM
            key = _rows_turned(
                rows,
                key_norm,
                eps,
                cosines,
                sines,
                NUM_KV_HEADS,
                DIM,
                TURNED,
                ANGLES,
                OF_NEIGHBOURS,
                IN_ORDER,
                PADDED_KV_HEADS,
                PADDED_DIM,
            )
            heads, columns = tl.arange(0, PADDED_KV_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
            mask = (heads < NUM_KV_HEADS) & (columns < DIM)
            places = NUM_KV_HEADS * DIM + heads * DIM + columns
            value = tl.load(rows + places, mask=mask, other=0.0).to(tl.float32)
            sick = is_sick(largest_of(value, 1))[:, None]
            # Rounded first: a layer that is not fused stores the same bytes.
            key = tl.where(sick, float("nan"), key).to(query.dtype.element_ty)
            value = tl.where(sick, 0.0, value).to(query.dtype.element_ty)
            _store_heads(keys, slot, key, NUM_KV_HEADS, DIM, PADDED_KV_HEADS, PADDED_DIM, BLOCK_SIZE, PAGES)
            _store_heads(
                values, slot, value, NUM_KV_HEADS, DIM, PADDED_KV_HEADS, PADDED_DIM, BLOCK_SIZE, PAGES
            )
