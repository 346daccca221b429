"""The device code that multiplies with coded weights, in Triton: codes become numbers on their way.

Weights stand to the left, [OUTS, columns], and rows of inputs to the right, so that the matrix units get the
same instructions for a weight whatever the number of rows is. A sum goes through the columns in an order that
the weight's shape alone decides. Inputs are rounded as by Micikevicius et al. 2022 ("FP8 formats for deep
learning"), with scales for short runs of columns as in DeepSeek-V3 (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

_FP8_MOST = tl.constexpr(448.0)
_LEAST_LARGEST = tl.constexpr(1e-30)


@triton.jit
def _codes_at(codes, outs, num_outputs, columns, ROW: tl.constexpr, EVEN: tl.constexpr):
    """A tile [OUTS, STEP] of codes, or of bytes of two; whatever lies behind the last is 0."""
    mask = (outs < num_outputs)[:, None]
    if not EVEN:
        mask = mask & (columns < ROW)[None, :]
    return tl.load(codes + outs.to(tl.int64)[:, None] * ROW + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _scale_of(scales, outs, num_outputs, group, WEIGHT: tl.constexpr):
    """What a code of each output is worth in a group of columns, [OUTS]."""
    places = (outs // WEIGHT.rows).to(tl.int64) * WEIGHT.groups + group
    return tl.load(scales + places, mask=outs < num_outputs, other=0.0).to(tl.float32)


@triton.jit
def _numbers_of(
    tile,
    scales,
    zeros,
    outs,
    num_outputs,
    group,
    WEIGHT: tl.constexpr,
):
    """The weights that a tile [OUTS, STEP] of codes of one group stands for, in float32."""
    numbers = tile.to(tl.float32)
    if WEIGHT.has_zeros:
        zero = tl.load(zeros + outs.to(tl.int64) * WEIGHT.groups + group, mask=outs < num_outputs, other=0.0)
        numbers -= zero.to(tl.float32)[:, None]
    elif WEIGHT.middle:
        numbers -= WEIGHT.middle
    return numbers * _scale_of(scales, outs, num_outputs, group, WEIGHT)[:, None]


@triton.jit
def _inputs_at(x, order, rows, num_rows, columns, WIDTH: tl.constexpr, HAS_ORDER: tl.constexpr):
    """Inputs of the columns, [STEP, ROWS]; 0 behind the last."""
    inside = columns < WIDTH
    places = columns
    if HAS_ORDER:
        places = tl.load(order + columns, mask=inside, other=0)
    mask = inside[:, None] & (rows < num_rows)[None, :]
    return tl.load(x + rows.to(tl.int64)[None, :] * WIDTH + places[:, None], mask=mask, other=0.0)


@triton.jit
def _with_step(
    total,
    tile,
    x,
    x_scales,
    scales,
    zeros,
    order,
    outs,
    rows,
    num_outputs,
    num_rows,
    first,
    WEIGHT: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """`total` [OUTS, ROWS] and the products of a tile [OUTS, STEP] of codes from the column `first` on."""
    inputs = _inputs_at(
        x, order, rows, num_rows, first + tl.arange(0, LAYOUT.step), WEIGHT.width, WEIGHT.has_order
    )
    group = tl.minimum(first // WEIGHT.group, WEIGHT.groups - 1)
    if WEIGHT.x_group:
        x_groups: tl.constexpr = (WEIGHT.width + WEIGHT.x_group - 1) // WEIGHT.x_group
        x_place = tl.minimum(first // WEIGHT.x_group, x_groups - 1)
        x_scale = tl.load(x_scales + rows.to(tl.int64) * x_groups + x_place, mask=rows < num_rows, other=0.0)
        scale = _scale_of(scales, outs, num_outputs, group, WEIGHT)
        if LAYOUT.is_native:
            products = tl.dot(tile, inputs)
        else:
            products = tl.dot(tile.to(tl.float16), inputs.to(tl.float16))
        return total + products * (scale[:, None] * x_scale[None, :])
    numbers = _numbers_of(tile, scales, zeros, outs, num_outputs, group, WEIGHT)
    return tl.dot(numbers.to(inputs.dtype), inputs, total, input_precision="ieee")


@triton.jit
def _part_of(
    part,
    x,
    x_scales,
    codes,
    scales,
    zeros,
    order,
    outs,
    rows,
    num_outputs,
    num_rows,
    WEIGHT: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The sums [OUTS, ROWS] over the columns of one part, in their order."""
    OUTS: tl.constexpr = LAYOUT.outs
    ROWS: tl.constexpr = LAYOUT.rows
    total = tl.zeros([OUTS, ROWS], tl.float32)
    last = tl.minimum((part + 1) * LAYOUT.chunks_of_part, LAYOUT.num_chunks)
    for chunk in tl.range(part * LAYOUT.chunks_of_part, last):
        places = chunk * LAYOUT.step + tl.arange(0, LAYOUT.step)
        tile = _codes_at(codes, outs, num_outputs, places, WEIGHT.row, WEIGHT.row % LAYOUT.step == 0)
        if WEIGHT.is_paired:
            first = 2 * chunk * LAYOUT.step
            total = _with_step(
                total, tile & 15, x, x_scales, scales, zeros, order, outs, rows, num_outputs, num_rows,
                first, WEIGHT, LAYOUT,
            )  # fmt: skip
            total = _with_step(
                total, tile >> 4, x, x_scales, scales, zeros, order, outs, rows, num_outputs, num_rows,
                first + LAYOUT.step, WEIGHT, LAYOUT,
            )  # fmt: skip
        else:
            total = _with_step(
                total, tile, x, x_scales, scales, zeros, order, outs, rows, num_outputs, num_rows,
                chunk * LAYOUT.step, WEIGHT, LAYOUT,
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["num_rows"])
def coded_product_kernel(
    x,
    x_scales,
    codes,
    scales,
    zeros,
    order,
    bias,
    added,
    product,
    parts,
    num_rows,
    num_outputs,
    WEIGHT: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """A tile of `x` [num_rows, width] times the weights; grid (tiles of outputs * tiles of rows).

    Rounded inputs come with `x_scales` [num_rows, groups]. A program sums all parts, each from nothing, and
    writes `product` [num_rows, num_outputs]; with LAYOUT.is_split there are programs for each
    part, which write to `parts` [parts, num_rows, num_outputs].
    """
    row_tiles = tl.cdiv(num_rows, LAYOUT.rows)
    out_tiles = tl.cdiv(num_outputs, LAYOUT.outs)
    rows = tl.program_id(0) % row_tiles * LAYOUT.rows + tl.arange(0, LAYOUT.rows)
    outs = tl.program_id(0) // row_tiles % out_tiles * LAYOUT.outs + tl.arange(0, LAYOUT.outs)
    mask = (outs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    places = rows.to(tl.int64)[None, :] * num_outputs + outs[:, None]
    if LAYOUT.is_split:
        part = tl.program_id(0) // row_tiles // out_tiles
        total = _part_of(
            part, x, x_scales, codes, scales, zeros, order, outs, rows, num_outputs, num_rows, WEIGHT, LAYOUT
        )
        tl.store(parts + part.to(tl.int64) * num_rows * num_outputs + places, total, mask=mask)
    else:
        OUTS: tl.constexpr = LAYOUT.outs
        ROWS: tl.constexpr = LAYOUT.rows
        total = tl.zeros([OUTS, ROWS], tl.float32)
        for part in tl.range(0, LAYOUT.num_parts):
            total += _part_of(
                part, x, x_scales, codes, scales, zeros, order, outs, rows, num_outputs, num_rows, WEIGHT,
                LAYOUT,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + outs, mask=outs < num_outputs, other=0.0).to(tl.float32)[:, None]
        if HAS_ADDED:
            total += tl.load(added + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(product + places, total.to(product.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def merge_parts_kernel(
    parts,
    bias,
    added,
    product,
    num_rows,
    num_outputs,
    NUM_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """The sum of all `parts` [NUM_PARTS, num_rows, num_outputs] in their order; grid (rows * chunks)."""
    chunks = tl.cdiv(num_outputs, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    outs = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    mask = outs < num_outputs
    places = row * num_outputs + outs
    total = tl.zeros([CHUNK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts + part * num_rows.to(tl.int64) * num_outputs + places, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        total += tl.load(added + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + places, total.to(product.dtype.element_ty), mask=mask)


@triton.jit
def expand_kernel(
    codes,
    scales,
    zeros,
    order,
    numbers,
    num_outputs,
    WEIGHT: tl.constexpr,
    STEP: tl.constexpr,
    OUTS: tl.constexpr,
):
    """The weights as `numbers` [num_outputs, width]; grid (tiles of outputs * chunks of STEP places)."""
    chunks: tl.constexpr = (WEIGHT.row + STEP - 1) // STEP
    chunk = tl.program_id(0) % chunks
    outs = tl.program_id(0) // chunks * OUTS + tl.arange(0, OUTS)
    steps = tl.arange(0, STEP)
    tile = _codes_at(codes, outs, num_outputs, chunk * STEP + steps, WEIGHT.row, WEIGHT.row % STEP == 0)
    for half in tl.static_range(2 if WEIGHT.is_paired else 1):
        first = chunk * STEP
        own = tile
        if WEIGHT.is_paired:
            first = (2 * chunk + half) * STEP
            own = (tile >> (4 * half)) & 15
        columns = first + steps
        group = tl.minimum(first // WEIGHT.group, WEIGHT.groups - 1)
        found = _numbers_of(own, scales, zeros, outs, num_outputs, group, WEIGHT)
        places = columns
        if WEIGHT.has_order:
            places = tl.load(order + columns, mask=columns < WEIGHT.width, other=0)
        mask = (outs < num_outputs)[:, None] & (columns < WEIGHT.width)[None, :]
        targets = numbers + outs.to(tl.int64)[:, None] * WEIGHT.width + places[None, :]
        tl.store(targets, found.to(numbers.dtype.element_ty), mask=mask)


@triton.jit
def round_kernel(
    x,
    fixed,
    codes,
    scales,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_FIXED: tl.constexpr,
):
    """GROUP neighbours of a row of `x` [rows, WIDTH] as 8 bits and their scale; grid (rows * groups).

    With HAS_FIXED the scale is `fixed`. What is no number stays none.
    """
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    row = (tl.program_id(0) // groups).to(tl.int64)
    places = tl.arange(0, PADDED)
    columns = tl.program_id(0) % groups * GROUP + places
    mask = (places < GROUP) & (columns < WIDTH)
    numbers = tl.load(x + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_FIXED:
        scale = tl.load(fixed)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), 0), _LEAST_LARGEST), _FP8_MOST)
    rounded = tl.div_rn(numbers, scale)
    rounded = tl.minimum(rounded, _FP8_MOST, propagate_nan=tl.PropagateNan.ALL)
    rounded = tl.maximum(rounded, -_FP8_MOST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        codes + row * WIDTH + columns,
        rounded.to(codes.dtype.element_ty, fp_downcast_rounding="rtne"),
        mask=mask,
    )
    tl.store(scales + tl.program_id(0), scale)
