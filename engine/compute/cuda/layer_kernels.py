"""The device code between a layer's matrix products, in Triton: norms and the gate of an MLP.

Each row is read once and written once, computed in float32. The norm is that of Zhang and Sennrich 2019, the
gate one of Shazeer 2020 (SwiGLU, GEGLU).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.triton_activations import activated


@triton.jit
def _normed(row, scale, eps, WIDTH):
    return row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps) * scale


@triton.jit
def _rounded_norm(row, weight, columns, mask, eps, WIDTH, TYPE: tl.constexpr):
    """As a norm of its own stores it."""
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    return _normed(row, scale, eps, WIDTH).to(TYPE).to(tl.float32)


@triton.jit
def _centred(row, mask, WIDTH):
    return tl.where(mask, row - tl.sum(row, 0) / WIDTH, 0.0)


@triton.jit
def _summed_by_shares(
    answers,
    chosen,
    shares,
    first,
    columns,
    COUNT: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of `answers` [pairs, WIDTH] EACH from the `first` on, summed by `shares` [pairs] in float32.

    They are added in the order in which it chose. A number that none of COUNT experts has is left out.
    """
    total = tl.zeros_like(columns).to(tl.float32)
    for place in tl.static_range(EACH):
        pair = first + place
        expert = tl.load(chosen + pair)
        mask = columns < tl.where((expert >= 0) & (expert < COUNT), WIDTH, 0)
        answer = tl.load(answers + pair * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, answer * tl.load(shares + pair).to(tl.float32), 0.0)
    return total


@triton.jit
def norm_kernel(
    given,
    added,
    chosen,
    shares,
    beside,
    added_weight,
    beside_weight,
    both_weight,
    weight,
    total,
    normed,
    multiplier,
    factor,
    added_eps,
    beside_eps,
    both_eps,
    eps,
    HAS_ADDED: tl.constexpr,
    NORMS_ADDED: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    COUNT: tl.constexpr,
    EACH: tl.constexpr,
    EACH_BESIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The norm of each row of `given` [rows, WIDTH], where HAS_NORM; grid (rows).

    With HAS_ADDED it is that of `given` + `multiplier` * `added`, which goes to `total`, rounded as it is
    stored, and again when it is multiplied with `factor`. With NORMS_ADDED what is added is normed before.
    With EACH that is what so many of COUNT experts answer to a row, [rows, EACH, WIDTH], summed by shares.
    With HAS_BESIDE that is `added` and `beside`, each normed, and their sum normed anew; with EACH_BESIDE the
    last so many of EACH are summed by themselves and are what is beside.
    With IS_CENTRED the mean of `given`, or of that sum, is taken off before it is normed (Ba et al. 2016).
    """
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    number = tl.program_id(0).to(tl.int64)
    places = number * WIDTH + columns
    row = tl.load(given + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)  # on its way beside the row
    if HAS_ADDED:
        TYPE: tl.constexpr = total.dtype.element_ty
        if EACH > 0:
            pair = number * EACH
            more = _summed_by_shares(added, chosen, shares, pair, columns, COUNT, EACH - EACH_BESIDE, WIDTH)
            more = more.to(TYPE).to(tl.float32)  # as a sum of its own stores it
        else:
            more = tl.load(added + places, mask=mask, other=0.0).to(tl.float32)
        if NORMS_ADDED:
            more = _rounded_norm(more, added_weight, columns, mask, added_eps, WIDTH, TYPE)
        if HAS_BESIDE:
            if EACH_BESIDE > 0:
                pair = number * EACH + EACH - EACH_BESIDE
                others = _summed_by_shares(added, chosen, shares, pair, columns, COUNT, EACH_BESIDE, WIDTH)
                others = others.to(TYPE).to(tl.float32)
            else:
                others = tl.load(beside + places, mask=mask, other=0.0).to(tl.float32)
            more += _rounded_norm(others, beside_weight, columns, mask, beside_eps, WIDTH, TYPE)
            more = more.to(TYPE).to(tl.float32)
            more = _rounded_norm(more, both_weight, columns, mask, both_eps, WIDTH, TYPE)
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
