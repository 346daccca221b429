"""The device code of a mixture, in Triton: who is chosen, whose rows are whose, two products, a weighted sum.

Rows are sorted by the expert that they go through, unless they are few, and multiplied tile by tile, as in
Gale et al. 2022 ("MegaBlocks"). What is launched follows from the number of rows alone, so that a CUDA graph
can hold it: who chose whom is read on the device. A number that no expert has is left out. Weights stand to
the left, as in `coded_kernels`, and each sum goes through its inputs in their order: a row has the same bits
in any company.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.layer_kernels import _normed, _rounded_norm, _summed_by_shares
from engine.compute.cuda.triton_activations import activated

_WORDS = tl.constexpr(3)  # of a tile: its expert, its first pair in their order, and where the expert's end


@triton.jit
def _highest(numbers):
    return tl.max(tl.max(numbers, 1), 0)


@triton.jit
def _kept_groups(keys, CHOICE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Which groups count, [GROUPS]: those whose two highest `keys` [GROUPS, SIZE] sum to most."""
    places, groups = tl.arange(0, SIZE)[None, :], tl.arange(0, GROUPS)
    highest = tl.max(keys, 1)
    first = tl.min(tl.where(keys == highest[:, None], places, SIZE), 1)
    sums = highest + tl.max(tl.where(places == first[:, None], float("-inf"), keys), 1)
    is_left = groups < CHOICE.num_groups
    is_kept = groups < 0
    for _ in tl.range(0, CHOICE.kept_groups):
        most = tl.max(tl.where(is_left, sums, float("-inf")), 0)
        own = groups == tl.min(tl.where(is_left & (sums == most), groups, GROUPS), 0)
        is_kept = is_kept | own
        is_left = is_left & (own == 0)
    return is_kept


@triton.jit
def choose_kernel(
    logits,
    biases,
    scales,
    shares,
    chosen,
    CHOICE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Experts for a row of `logits` [rows, count] as CHOICE says, and their shares; grid (rows).

    Both go to [rows, each], the highest first, and of equal ones that with the lowest number; behind them
    come the experts that all rows go through. `biases` [count] are added to what is compared, not to shares;
    these are multiplied with `scales` [count]. GROUPS, SIZE and PLACES are powers of two that hold the
    groups, the experts of one, and those of a row. A number that is NaN shows in the shares.
    """
    row = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    experts = groups * CHOICE.size + places
    is_open = (groups < CHOICE.num_groups) & (places < CHOICE.size)
    numbers = tl.load(logits + row * CHOICE.count + experts, mask=is_open, other=float("-inf")).to(tl.float32)
    if CHOICE.by_sigmoid:
        scores = tl.sigmoid(numbers)
        keys = scores
    else:
        keys = numbers
        scores = tl.exp(numbers - _highest(numbers))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    if HAS_BIASES:
        keys += tl.load(biases + experts, mask=is_open, other=0.0).to(tl.float32)
    keys = tl.where(keys == keys, keys, float("inf"))  # NaN is chosen, so that it shows
    keys = tl.where(is_open, keys, float("-inf"))
    if CHOICE.kept_groups < CHOICE.num_groups:
        is_kept = _kept_groups(keys, CHOICE, GROUPS, SIZE)
        keys = tl.where(is_kept[:, None], keys, float("-inf"))
    slots = tl.arange(0, PLACES)
    numbers_of = tl.zeros([PLACES], tl.int32)
    shares_of = tl.zeros([PLACES], tl.float32)
    for place in tl.range(0, CHOICE.each):
        is_best = is_open & (keys == _highest(tl.where(is_open, keys, float("-inf"))))
        expert = tl.min(tl.min(tl.where(is_best, experts, CHOICE.count), 1), 0)
        own = is_open & (experts == expert)
        share = tl.sum(tl.sum(tl.where(own, scores, 0.0), 1), 0)
        numbers_of = tl.where(slots == place, expert, numbers_of)
        shares_of = tl.where(slots == place, share, shares_of)
        is_open = is_open & (own == 0)
    if CHOICE.is_normed:
        shares_of = shares_of / (tl.sum(shares_of, 0) + CHOICE.least)
    shares_of = shares_of * CHOICE.factor
    is_chosen = slots < CHOICE.each
    if HAS_SCALES:
        shares_of = shares_of * tl.load(scales + numbers_of, mask=is_chosen, other=0.0).to(tl.float32)
    numbers_of = tl.where(is_chosen, numbers_of, CHOICE.count + slots - CHOICE.each)
    shares_of = tl.where(is_chosen, shares_of, 1.0)
    EACH: tl.constexpr = CHOICE.each + CHOICE.num_shared
    is_slot = slots < EACH
    targets = row * EACH + slots
    tl.store(chosen + targets, numbers_of, mask=is_slot)
    tl.store(shares + targets, shares_of.to(shares.dtype.element_ty), mask=is_slot)


@triton.jit
def _scaled_norm(row, scale, columns, mask, root, eps, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """A row as Gemma 4's router reads it, in float32.

    It is divided by its size, then multiplied with `scale`, then with `root`, and rounded after each: another
    rounding would send rows to other experts.
    """
    scales = tl.load(scale + columns, mask=mask, other=0.0).to(tl.float32)
    bare = _normed(row, 1.0, eps, WIDTH).to(TYPE).to(tl.float32)
    scaled = (bare * scales).to(TYPE).to(tl.float32)
    return (scaled * root).to(TYPE)


@triton.jit
def scaled_norm_kernel(
    given,
    scale,
    normed,
    root,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Each row of `given` [rows, WIDTH] as Gemma 4's router reads it; grid (rows)."""
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(given + places, mask=mask, other=0.0).to(tl.float32)
    scaled = _scaled_norm(row, scale, columns, mask, root, eps, WIDTH, normed.dtype.element_ty)
    tl.store(normed + places, scaled, mask=mask)


@triton.jit
def three_norms_kernel(
    given,
    added,
    added_weight,
    weight,
    other_weight,
    scale,
    total,
    normed,
    other,
    scaled,
    multiplier,
    root,
    added_eps,
    eps,
    other_eps,
    scale_eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """`given` + `multiplier` * the norm of `added`, both [rows, WIDTH], and three norms of that; grid (rows).

    As `norm_kernel` computes it, of which `normed` is the norm by `weight`, `other` by `other_weight`, and
    `scaled` what Gemma 4's router reads.
    """
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    TYPE: tl.constexpr = total.dtype.element_ty
    row = tl.load(given + places, mask=mask, other=0.0).to(tl.float32)
    more = tl.load(added + places, mask=mask, other=0.0).to(tl.float32)
    row += _rounded_norm(more, added_weight, columns, mask, added_eps, WIDTH, TYPE) * multiplier
    rounded = row.to(TYPE)
    tl.store(total + places, rounded, mask=mask)
    row = rounded.to(tl.float32)
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + places, _normed(row, scales, eps, WIDTH).to(TYPE), mask=mask)
    scales = tl.load(other_weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(other + places, _normed(row, scales, other_eps, WIDTH).to(TYPE), mask=mask)
    last = _scaled_norm(row, scale, columns, mask, root, scale_eps, WIDTH, TYPE)
    tl.store(scaled + places, last, mask=mask)


@triton.jit
def _experts_at(chosen, pairs, num_pairs, COUNT: tl.constexpr):
    """Whom these pairs are for; COUNT, which is no expert, for those that are none's."""
    found = tl.load(chosen + pairs, mask=pairs < num_pairs, other=COUNT).to(tl.int32)
    return tl.where((found < 0) | (found > COUNT), COUNT, found)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def route_kernel(
    chosen,
    order,
    tiles,
    num_pairs,
    num_tiles,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort the pairs of rows and experts by these; grid (COUNT), for each expert a program.

    `chosen` [num_pairs] are experts. `order` [num_pairs] gets the numbers of pairs, expert after expert, each
    one's in their order, and `tiles` [num_tiles, 3] runs of up to ROWS of one; one that ends before it begins
    is empty. An expert's tiles begin where those before it end at most: before // ROWS + min(expert, before),
    for so many pairs `before` it, so that no program need know what other experts have.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, CHUNK)
    befores = tl.zeros([CHUNK], tl.int32)
    owns = tl.zeros([CHUNK], tl.int32)
    for first in tl.range(0, num_pairs, CHUNK):
        found = _experts_at(chosen, first + places, num_pairs, COUNT)
        befores += (found < expert).to(tl.int32)
        owns += (found == expert).to(tl.int32)
    before = tl.sum(befores, 0)
    last = before + tl.sum(owns, 0)
    rank = before
    for first in tl.range(0, num_pairs, CHUNK):
        own = (_experts_at(chosen, first + places, num_pairs, COUNT) == expert).to(tl.int32)
        tl.store(order + rank + tl.cumsum(own, 0) - 1, first + places, mask=own != 0)
        rank += tl.sum(own, 0)
    start = before // ROWS + tl.minimum(expert, before)
    stop = last // ROWS + tl.minimum(expert + 1, last)
    if expert == COUNT - 1:
        stop = num_tiles
    for first in tl.range(start, stop, CHUNK):
        numbers = first + places
        mask = numbers < stop
        words = tiles + numbers * _WORDS
        tl.store(words, tl.zeros([CHUNK], tl.int32) + expert, mask=mask)
        tl.store(words + 1, before + (numbers - start) * ROWS, mask=mask)
        tl.store(words + 2, tl.zeros([CHUNK], tl.int32) + last, mask=mask)


@triton.jit
def _tile_at(chosen, tiles, tile, num_tiles, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """A tile's expert, its first pair, and where the expert's pairs end; of found ones, among these alone."""
    MOST: tl.constexpr = LAYOUT.most_found
    if MOST > 0:
        pairs = tl.arange(0, MOST)
        own = tl.load(chosen + tile)
        is_own = _experts_at(chosen, pairs, num_tiles, COUNT) == own
        first = tl.sum((is_own & (pairs < tile)).to(tl.int32), 0)
        last = tl.sum(is_own.to(tl.int32), 0)
        begins = (first % LAYOUT.rows == 0) & (own >= 0) & (own < COUNT)
        expert, last = own.to(tl.int64), tl.where(begins, last, first)
    else:
        words = tiles + tile * _WORDS
        expert, first, last = tl.load(words).to(tl.int64), tl.load(words + 1), tl.load(words + 2)
    return expert, first, last


@triton.jit
def _pairs_at(chosen, order, expert, slots, is_row, num_tiles, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """The numbers of an expert's pairs at `slots` [ROWS], which `_tile_at` told."""
    MOST: tl.constexpr = LAYOUT.most_found
    if MOST > 0:
        pairs = tl.arange(0, MOST)
        is_own = _experts_at(chosen, pairs, num_tiles, COUNT) == expert
        ranks = tl.cumsum(is_own.to(tl.int32), 0) - 1
        is_there = is_own[None, :] & (ranks[None, :] == slots[:, None])  # [ROWS, pairs]
        found = tl.sum(tl.where(is_there, pairs[None, :], 0), 1)
    else:
        found = tl.load(order + slots, mask=is_row, other=0)
    return found


@triton.jit
def _weights_at(weights, outs, num_outs, columns, apart, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """A tile [OUTS, STEP] of weights [outputs, WIDTH], whose rows lie `apart`; 0 behind the last."""
    mask = (outs < num_outs)[:, None]
    if not EVEN:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(weights + outs.to(tl.int64)[:, None] * apart + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _inputs_at(x, rows, is_row, columns, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """A tile [STEP, ROWS] of rows [any, WIDTH]; 0 behind the last."""
    mask = is_row[None, :]
    if not EVEN:
        mask = mask & (columns < WIDTH)[:, None]
    return tl.load(x + rows.to(tl.int64)[None, :] * WIDTH + columns[:, None], mask=mask, other=0.0)


@triton.jit
def _activated(gate, SHAPE: tl.constexpr):
    ACTIVATION: tl.constexpr = SHAPE.activation
    ALPHA: tl.constexpr = SHAPE.alpha
    return activated(gate, ALPHA, ACTIVATION)


@triton.jit
def _gated(gate, up, SHAPE: tl.constexpr):
    """What a gate makes of what it is multiplied with, both in float32."""
    if SHAPE.is_limited:
        gate = tl.minimum(gate, SHAPE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, SHAPE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -SHAPE.limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return _activated(gate, SHAPE) * up


@triton.jit(do_not_specialize=["num_tiles"])
def expert_gate_kernel(
    x,
    shared_x,
    weights,
    shared_weights,
    biases,
    chosen,
    order,
    tiles,
    activated,
    num_tiles,
    EACH: tl.constexpr,
    SHAPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gates and ups of a tile of pairs, and what the one makes of the other; grid (tiles * tiles of gates).

    Of rows `x` [rows, hidden] each has EACH pairs, one behind the other. `weights` are [count, 2 * width,
    hidden], `biases` [count, 2 * width]. `activated` [pairs, width] is written in the order in which pairs
    are sorted; found ones lie at their numbers. Experts without gates have half the weights, and what these
    make of a row stands for a gate. Those that all rows go through are given `shared_x` and have
    `shared_weights`: all their gates, then all their ups.
    """
    tile = tl.program_id(0) % num_tiles
    expert, first, last = _tile_at(chosen, tiles, tile, num_tiles, SHAPE.num_experts, LAYOUT)
    if first >= last:
        return
    ROWS: tl.constexpr = LAYOUT.rows
    GATES: tl.constexpr = LAYOUT.outs // SHAPE.num_first
    WIDTH: tl.constexpr = SHAPE.width
    EVEN: tl.constexpr = SHAPE.hidden % STEP == 0
    slots = first + tl.arange(0, ROWS)
    is_row = slots < last
    pairs = _pairs_at(chosen, order, expert, slots, is_row, num_tiles, SHAPE.num_experts, LAYOUT)
    outs = tl.program_id(0) // num_tiles * GATES + tl.arange(0, GATES)
    gates = weights + expert * (SHAPE.num_first * WIDTH * SHAPE.hidden)
    ups = gates + WIDTH * SHAPE.hidden
    if SHAPE.num_shared > 0:
        is_shared = expert >= SHAPE.count
        own = shared_weights + (expert - SHAPE.count) * (WIDTH * SHAPE.hidden)
        gates = tl.where(is_shared, own, gates)
        ups = tl.where(is_shared, own + SHAPE.num_shared * WIDTH * SHAPE.hidden, ups)
        x = tl.where(is_shared, shared_x, x)
    gate = tl.zeros([GATES, ROWS], tl.float32)
    up = tl.zeros([GATES, ROWS], tl.float32)
    for column in tl.range(0, SHAPE.hidden, STEP):
        columns = column + tl.arange(0, STEP)
        inputs = _inputs_at(x, pairs // EACH, is_row, columns, SHAPE.hidden, EVEN)
        numbers = _weights_at(gates, outs, WIDTH, columns, SHAPE.hidden, SHAPE.hidden, EVEN)
        gate = tl.dot(numbers, inputs, gate, input_precision="ieee")
        if SHAPE.is_gated:
            numbers = _weights_at(ups, outs, WIDTH, columns, SHAPE.hidden, SHAPE.hidden, EVEN)
            up = tl.dot(numbers, inputs, up, input_precision="ieee")
    if SHAPE.is_limited:
        own = biases + expert * (2 * WIDTH) + outs
        gate += tl.load(own, mask=outs < WIDTH, other=0.0).to(tl.float32)[:, None]
        up += tl.load(own + WIDTH, mask=outs < WIDTH, other=0.0).to(tl.float32)[:, None]
    kind: tl.constexpr = activated.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)  # as products are rounded
    result = _gated(gate, up, SHAPE) if SHAPE.is_gated else _activated(gate, SHAPE)
    places = pairs if LAYOUT.most_found > 0 else slots
    targets = activated + places.to(tl.int64)[None, :] * WIDTH + outs[:, None]
    tl.store(targets, result.to(kind), mask=(outs < WIDTH)[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def expert_down_kernel(
    activated,
    weights,
    shared_weights,
    biases,
    chosen,
    order,
    tiles,
    answers,
    num_tiles,
    SHAPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """What experts answer to a tile of pairs; grid (tiles * tiles of outputs).

    `activated` is [pairs, width] as `expert_gate_kernel` leaves it, `weights` [count, hidden, width] and
    `biases` [count, hidden]. `answers` [pairs, hidden] has each pair at its number. Of experts that all rows
    go through `shared_weights` are [hidden, num_shared * width].
    """
    tile = tl.program_id(0) % num_tiles
    expert, first, last = _tile_at(chosen, tiles, tile, num_tiles, SHAPE.num_experts, LAYOUT)
    if first >= last:
        return
    ROWS: tl.constexpr = LAYOUT.rows
    OUTS: tl.constexpr = LAYOUT.outs
    HIDDEN: tl.constexpr = SHAPE.hidden
    EVEN: tl.constexpr = SHAPE.width % STEP == 0
    slots = first + tl.arange(0, ROWS)
    is_row = slots < last
    pairs = _pairs_at(chosen, order, expert, slots, is_row, num_tiles, SHAPE.num_experts, LAYOUT)
    places = pairs if LAYOUT.most_found > 0 else slots
    outs = tl.program_id(0) // num_tiles * OUTS + tl.arange(0, OUTS)
    own, apart = weights + expert * (HIDDEN * SHAPE.width), SHAPE.width
    if SHAPE.num_shared > 0:
        is_shared = expert >= SHAPE.count
        own = tl.where(is_shared, shared_weights + (expert - SHAPE.count) * SHAPE.width, own)
        if SHAPE.num_shared > 1:
            apart = tl.where(is_shared, SHAPE.num_shared * SHAPE.width, SHAPE.width)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for column in tl.range(0, SHAPE.width, STEP):
        columns = column + tl.arange(0, STEP)
        inputs = _inputs_at(activated, places, is_row, columns, SHAPE.width, EVEN)
        numbers = _weights_at(own, outs, HIDDEN, columns, apart, SHAPE.width, EVEN)
        total = tl.dot(numbers, inputs, total, input_precision="ieee")
    if SHAPE.is_limited:
        bias = tl.load(biases + expert * HIDDEN + outs, mask=outs < HIDDEN, other=0.0)
        total += bias.to(tl.float32)[:, None]
    targets = answers + pairs.to(tl.int64)[None, :] * HIDDEN + outs[:, None]
    tl.store(targets, total.to(answers.dtype.element_ty), mask=(outs < HIDDEN)[:, None] & is_row[None, :])


@triton.jit
def expert_sum_kernel(
    answers,
    chosen,
    shares,
    summed,
    COUNT: tl.constexpr,
    EACH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each row's `answers` [rows, EACH, HIDDEN], summed by `shares` [rows, EACH]; grid (rows * CHUNKS)."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    outs = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    total = _summed_by_shares(answers, chosen, shares, row * EACH, outs, COUNT, EACH, HIDDEN)
    tl.store(summed + row * HIDDEN + outs, total.to(summed.dtype.element_ty), mask=outs < HIDDEN)
