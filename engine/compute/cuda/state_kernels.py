"""The device code of recurrent layers, in Triton: how the tokens of each sequence advance its state.

Each program has a part of one sequence's state to itself and takes that sequence's tokens in one by one, so
a token's result has the same bits alone and in a crowd. What is launched follows from the number of tokens
and sequences alone: which slots they continue is read on the device. Where `state_chunks` has taken in whole
chunks of a sequence before, `chunk` is their size: what is left is done here. Else it is NO_CHUNKS.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_CHUNKS = tl.constexpr(1 << 30)  # more tokens than any sequence has


@triton.jit
def _run_at(runs, num_runs, chunk):
    """Of what is left of this program's sequence its slot, its first row, how many it has, and how many are
    taken in; with nothing left the slot is -1."""
    run = runs + tl.program_id(0)
    count, taken = tl.load(run + 2 * num_runs), tl.load(run + 3 * num_runs)
    done = taken - taken % chunk
    slot = tl.where(count > done, tl.load(run), -1)
    return slot, tl.load(run + num_runs) + done, count - done, taken - done


@triton.jit(do_not_specialize=["num_runs", "chunk"])
def delta_kernel(
    query,
    key,
    value,
    logs,
    beta,
    output,
    state,
    runs,
    num_runs,
    chunk,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gated delta rule, see `delta_scan`; grid (runs, HEADS * blocks of COLUMNS values).

    `query` and `key` are [M, HEADS / SHARE, KEYS], `value` and `output` [M, HEADS, VALUES], `logs` [M, HEADS,
    KEYS or 1], `beta` [M, HEADS], `state` [slots, HEADS, KEYS, VALUES], float32 but for values and output,
    which have one dtype; `runs` int64 [4, runs].
    """
    slot, first, count, taken = _run_at(runs, num_runs, chunk)
    if slot < 0:
        return
    blocks: tl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // blocks
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = keys < KEYS, columns < VALUES
    mask = is_key[:, None] & is_value[None, :]
    places = state + (slot * HEADS + head) * KEYS * VALUES + keys[:, None] * VALUES + columns[None, :]
    held = tl.load(places, mask=mask, other=0.0)
    for token in range(0, count):
        if token == taken:
            tl.store(places, held, mask=mask)
        row = (first + token) * HEADS + head
        shared = ((first + token) * (HEADS // SHARE) + head // SHARE) * KEYS + keys
        if BY_CHANNEL:
            held *= tl.exp(tl.load(logs + row * KEYS + keys, mask=is_key, other=0.0))[:, None]
        else:
            held *= tl.exp(tl.load(logs + row))
        known = tl.load(key + shared, mask=is_key, other=0.0)
        recalled = tl.sum(held * known[:, None], 0)
        wanted = tl.load(value + row * VALUES + columns, mask=is_value, other=0.0).to(tl.float32)
        held += known[:, None] * (tl.load(beta + row) * (wanted - recalled))[None, :]
        asked = tl.load(query + shared, mask=is_key, other=0.0)
        said = tl.sum(held * asked[:, None], 0).to(output.dtype.element_ty)
        tl.store(output + row * VALUES + columns, said, mask=is_value)
    if taken == count:
        tl.store(places, held, mask=mask)


@triton.jit(do_not_specialize=["num_runs", "chunk"])
def structured_kernel(
    inputs,
    logs,
    b,
    c,
    output,
    state,
    runs,
    num_runs,
    chunk,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    """One decay for each head, see `structured_scan`; grid (runs, HEADS * blocks of ROWS of DIM).

    `inputs` and `output` are [M, HEADS, DIM], `logs` [M, HEADS], `b` and `c` [M, HEADS / SHARE, SIZE],
    `state` [slots, HEADS, DIM, SIZE], of which logs and state are float32 and the others of one dtype; `runs`
    int64 [4, runs].
    """
    slot, first, count, taken = _run_at(runs, num_runs, chunk)
    if slot < 0:
        return
    blocks: tl.constexpr = (DIM + ROWS - 1) // ROWS
    head = tl.program_id(1) // blocks
    rows = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    is_row, is_column = rows < DIM, columns < SIZE
    mask = is_row[:, None] & is_column[None, :]
    places = state + (slot * HEADS + head) * DIM * SIZE + rows[:, None] * SIZE + columns[None, :]
    held = tl.load(places, mask=mask, other=0.0)
    for token in range(0, count):
        if token == taken:
            tl.store(places, held, mask=mask)
        row = (first + token) * HEADS + head
        shared = ((first + token) * (HEADS // SHARE) + head // SHARE) * SIZE + columns
        fed = tl.load(inputs + row * DIM + rows, mask=is_row, other=0.0).to(tl.float32)
        held *= tl.exp(tl.load(logs + row))
        given = tl.load(b + shared, mask=is_column, other=0.0).to(tl.float32)
        held += fed[:, None] * given[None, :]
        asked = tl.load(c + shared, mask=is_column, other=0.0).to(tl.float32)
        mixed = tl.sum(held * asked[None, :], 1).to(output.dtype.element_ty)
        tl.store(output + row * DIM + rows, mixed, mask=is_row)
    if taken == count:
        tl.store(places, held, mask=mask)


@triton.jit(do_not_specialize=["num_runs", "slot_stride"])
def selective_kernel(
    inputs,
    steps,
    rates,
    b,
    c,
    output,
    state,
    runs,
    num_runs,
    slot_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    """A decay for each number of the state, see `selective_scan`; grid (runs, blocks of ROWS channels).

    `inputs`, `steps` and `output` are [M, CHANNELS], `rates` [CHANNELS, SIZE], `b` and `c` [M, SIZE], `state`
    [slots, CHANNELS, SIZE] with slots `slot_stride` apart, all float32; `runs` int64 [4, runs].
    """
    slot, first, count, taken = _run_at(runs, num_runs, NO_CHUNKS)
    if slot < 0:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    is_row, is_column = rows < CHANNELS, columns < SIZE
    mask = is_row[:, None] & is_column[None, :]
    within = rows[:, None] * SIZE + columns[None, :]
    rate = tl.load(rates + within, mask=mask, other=0.0)
    places = state + slot * slot_stride + within
    held = tl.load(places, mask=mask, other=0.0)
    for token in range(0, count):
        if token == taken:
            tl.store(places, held, mask=mask)
        row = (first + token) * CHANNELS + rows
        shared = (first + token) * SIZE + columns
        step = tl.load(steps + row, mask=is_row, other=0.0)
        fed = step * tl.load(inputs + row, mask=is_row, other=0.0)
        held *= tl.exp(step[:, None] * rate)
        held += fed[:, None] * tl.load(b + shared, mask=is_column, other=0.0)[None, :]
        mixed = tl.sum(held * tl.load(c + shared, mask=is_column, other=0.0)[None, :], 1)
        tl.store(output + row, mixed, mask=is_row)
    if taken == count:
        tl.store(places, held, mask=mask)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), as torch's: x itself where they are equal.

    Where exp(x) is small a series: of the sum most of its digits would be lost.
    """
    grown = tl.exp(tl.minimum(x, 20.0))
    small = tl.minimum(grown, 0.0625)
    series = small * (1.0 - small * (1 / 2 - small * (1 / 3 - small * (1 / 4 - small * (1 / 5 - small / 6)))))
    return tl.where(x > 20.0, x, tl.where(grown < 0.0625, series, tl.log(1.0 + grown)))


@triton.jit
def _unit(row):
    """Of length 1, as `mixer_kinds` makes queries and keys."""
    return row * tl.rsqrt(tl.sum(row * row, 0) + 1e-6)


@triton.jit(do_not_specialize=["num_runs", "chunk"])
def gated_delta_kernel(
    rows,
    decays,
    bias,
    output,
    state,
    runs,
    num_runs,
    chunk,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE: tl.constexpr,
    BETA: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See `StateKernel.gated_delta`; grid (runs, HEADS * blocks of COLUMNS values).

    `rows`, STRIDE apart, have queries and keys [HEADS / SHARE, KEYS], values [HEADS, VALUES], and two gates
    [HEADS]; `decays` and `bias` are [HEADS], `output` [M, HEADS, VALUES], `state` [slots, HEADS, KEYS,
    VALUES] in float32; `runs` int64 [4, runs].
    """
    slot, first, count, taken = _run_at(runs, num_runs, chunk)
    if slot < 0:
        return
    blocks: tl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    key_width: tl.constexpr = HEADS // SHARE * KEYS
    head = tl.program_id(1) // blocks
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = keys < KEYS, columns < VALUES
    mask = is_key[:, None] & is_value[None, :]
    places = state + (slot * HEADS + head) * KEYS * VALUES + keys[:, None] * VALUES + columns[None, :]
    held = tl.load(places, mask=mask, other=0.0)
    rate = tl.exp(tl.load(decays + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    for token in range(0, count):
        if token == taken:
            tl.store(places, held, mask=mask)
        row = rows + (first + token) * STRIDE
        asked = row + head // SHARE * KEYS + keys
        values = row + 2 * key_width + head * VALUES + columns
        gates = row + 2 * key_width + HEADS * VALUES + head
        beta = tl.sigmoid(tl.load(gates).to(tl.float32)).to(rows.dtype.element_ty).to(tl.float32) * BETA
        held *= tl.exp(-rate * _softplus(tl.load(gates + HEADS).to(tl.float32) + shift))
        known = _unit(tl.load(asked + key_width, mask=is_key, other=0.0).to(tl.float32))
        recalled = tl.sum(held * known[:, None], 0)
        wanted = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
        held += known[:, None] * (beta * (wanted - recalled))[None, :]
        query = _unit(tl.load(asked, mask=is_key, other=0.0).to(tl.float32)) * SCALE
        said = tl.sum(held * query[:, None], 0).to(output.dtype.element_ty)
        tl.store(output + ((first + token) * HEADS + head) * VALUES + columns, said, mask=is_value)
    if taken == count:
        tl.store(places, held, mask=mask)


@triton.jit(do_not_specialize=["num_runs", "chunk", "least", "most"])
def gated_structured_kernel(
    rows,
    decays,
    bias,
    direct,
    output,
    state,
    runs,
    num_runs,
    chunk,
    least,
    most,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    """See `StateKernel.gated_structured`; grid (runs, HEADS * blocks of ROWS of DIM).

    `rows`, STRIDE apart, have inputs [HEADS, DIM], b and c [HEADS / SHARE, SIZE], and steps [HEADS];
    `decays`, `bias` and `direct` are [HEADS], `output` [M, HEADS, DIM] and `state` [slots, HEADS, DIM, SIZE]
    in float32; `runs` int64 [4, runs]. Steps are at `least` and at `most` so large.
    """
    slot, first, count, taken = _run_at(runs, num_runs, chunk)
    if slot < 0:
        return
    blocks: tl.constexpr = (DIM + ROWS - 1) // ROWS
    shared: tl.constexpr = HEADS // SHARE * SIZE
    head = tl.program_id(1) // blocks
    lines = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    is_line, is_column = lines < DIM, columns < SIZE
    mask = is_line[:, None] & is_column[None, :]
    places = state + (slot * HEADS + head) * DIM * SIZE + lines[:, None] * SIZE + columns[None, :]
    held = tl.load(places, mask=mask, other=0.0)
    rate = tl.exp(tl.load(decays + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    past = tl.load(direct + head).to(tl.float32)
    for token in range(0, count):
        if token == taken:
            tl.store(places, held, mask=mask)
        row = rows + (first + token) * STRIDE
        given = tl.load(row + head * DIM + lines, mask=is_line, other=0.0).to(tl.float32)
        gates = row + HEADS * DIM + head // SHARE * SIZE + columns
        b = tl.load(gates, mask=is_column, other=0.0).to(tl.float32)
        c = tl.load(gates + shared, mask=is_column, other=0.0).to(tl.float32)
        step = _softplus(tl.load(row + HEADS * DIM + 2 * shared + head).to(tl.float32) + shift)
        step = tl.minimum(tl.maximum(step, least), most)
        held *= tl.exp(-rate * step)
        held += (step * given)[:, None] * b[None, :]
        mixed = tl.sum(held * c[None, :], 1) + given * past
        tl.store(output + ((first + token) * HEADS + head) * DIM + lines, mixed, mask=is_line)
    if taken == count:
        tl.store(places, held, mask=mask)
