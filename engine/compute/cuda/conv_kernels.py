"""The device code of the short convolutions in recurrent layers, in Triton: over kept rows and new ones.

A sequence's row x is one of those that its slot keeps, the first `before` of which lie before its state's
end, or, behind these and those that are mixed once more, a new one. Where they are is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(1 << 62)  # where no run begins


@triton.jit
def _rows_at(rows, kept, sources, mask, SIZES: tl.constexpr):
    """Rows x of sequences: of each its slot, its first new row, how many kept ones are mixed; columns."""
    slot, fresh, again, x, columns = sources
    num_old = SIZES.before + again
    old = kept + (slot * SIZES.num_kept + x) * SIZES.width + columns
    new = rows + (fresh + x - num_old) * SIZES.stride + columns
    is_old = x < num_old
    return tl.load(old, mask=mask & is_old, other=0.0) + tl.load(new, mask=mask & (x >= num_old), other=0.0)


@triton.jit(do_not_specialize=["num_runs", "num_mixed"])
def convolve_kernel(
    rows,
    kept,
    weight,
    bias,
    output,
    runs,
    joins,
    num_runs,
    num_mixed,
    SIZES: tl.constexpr,
    RUNS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See `StateKernel.convolve`; grid (blocks of ROWS of M, blocks of COLUMNS of the width).

    `rows` are [N, width], SIZES.stride apart, `kept` [slots, num_kept, width], `output` [M, width], `weight`
    [channels, taps], `bias` [channels]; `runs` and `joins` are int64 [4, runs] and [2, runs]. Rows that no
    run has become 0.
    """
    numbers = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    every = tl.arange(0, RUNS_PADDED)
    is_run = every < num_runs
    slots = tl.load(runs + every, mask=is_run, other=-1)
    starts = tl.load(runs + num_runs + every, mask=is_run, other=0)
    starts = tl.where(slots >= 0, starts, _NEVER)  # used runs come first, in the order of their rows
    run = tl.sum((starts[None, :] <= numbers[:, None]).to(tl.int32), 1) - 1
    has_run = run >= 0
    run = tl.maximum(run, 0)
    place = numbers - tl.load(runs + num_runs + run)
    has_run = has_run & (place < tl.load(runs + 2 * num_runs + run))
    slot, fresh = tl.load(runs + run)[:, None], tl.load(joins + run)[:, None]
    again = tl.load(joins + num_runs + run)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column, is_channel = columns < SIZES.width, columns < SIZES.channels
    mask = has_run[:, None] & is_column[None, :]
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    row = tl.zeros([ROWS, COLUMNS], output.dtype.element_ty)
    taps: tl.constexpr = SIZES.taps
    for tap in tl.static_range(taps):
        x = place[:, None] + (SIZES.before + 1 - SIZES.taps + tap)
        row = _rows_at(rows, kept, (slot, fresh, again, x, columns[None, :]), mask, SIZES)
        factor = tl.load(weight + columns * SIZES.taps + tap, mask=is_channel, other=0.0)
        mixed += row.to(tl.float32) * factor.to(tl.float32)[None, :]
    if SIZES.has_bias:
        mixed += tl.load(bias + columns, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    rounded = mixed.to(output.dtype.element_ty)
    if SIZES.activated:
        numbers_of_it = rounded.to(tl.float32)
        rounded = (numbers_of_it * tl.sigmoid(numbers_of_it)).to(output.dtype.element_ty)
    result = tl.where(is_channel[None, :], rounded, row)
    result = tl.where(has_run[:, None], result, 0.0).to(output.dtype.element_ty)
    places = output + numbers.to(tl.int64)[:, None] * SIZES.width + columns[None, :]
    tl.store(places, result, mask=(numbers < num_mixed)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_runs"])
def keep_kernel(rows, kept, runs, joins, num_runs, SIZES: tl.constexpr, COLUMNS: tl.constexpr):
    """Put into slots what the next pass may need; grid (runs, blocks of COLUMNS of the width).

    That is each sequence's rows from `before` ones before its state's end on. They move to lower places or
    stay, one after the other, so none is written over before it is read.
    """
    run = tl.program_id(0)
    slot = tl.load(runs + run)
    if slot < 0:
        return
    count, taken = tl.load(runs + 2 * num_runs + run), tl.load(runs + 3 * num_runs + run)
    fresh, again = tl.load(joins + run), tl.load(joins + num_runs + run)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZES.width
    target = kept + slot * SIZES.num_kept * SIZES.width + columns
    for place in tl.range(0, SIZES.before + count - taken, num_stages=1):
        row = _rows_at(rows, kept, (slot, fresh, again, taken + place + columns * 0, columns), mask, SIZES)
        tl.store(target + place * SIZES.width, row, mask=mask)
