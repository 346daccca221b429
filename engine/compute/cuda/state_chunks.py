"""The device code of recurrent layers for prompts, in Triton: a sequence's tokens taken in by whole chunks.

One by one each token waits for the state that the one before has left. What the tokens of a chunk do to each
other are products of small matrices, and the state is carried on once for all of them: Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024; Dao & Gu, "Transformers
are SSMs", 2024. What is left of a sequence behind its whole chunks `state_kernels` takes in.

A program has the same part of the states of several sequences, one after the other: most steps have few that
are so long, and how many is known on the device alone. Sums and states are float32. Chunks are of 16 tokens:
a product has no shorter side, and of a longer one more tokens are settled one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.state_kernels import _softplus


@triton.jit
def _chunks_at(runs, num_runs, number, CHUNK: tl.constexpr, RUNS_PADDED: tl.constexpr):
    """Of a sequence its slot, its first row, and how many whole chunks are taken in.

    Those with a chunk or more are numbered; behind the last are 0 chunks.
    """
    every = tl.arange(0, RUNS_PADDED)
    is_run = every < num_runs
    slots = tl.load(runs + every, mask=is_run, other=-1)
    starts = tl.load(runs + num_runs + every, mask=is_run, other=0)
    taken = tl.load(runs + 3 * num_runs + every, mask=is_run, other=0)
    is_long = (slots >= 0) & (taken >= CHUNK)
    is_ours = is_long & (tl.cumsum(is_long.to(tl.int32), 0) == number + 1)
    slot, first = tl.sum(tl.where(is_ours, slots, 0), 0), tl.sum(tl.where(is_ours, starts, 0), 0)
    return slot, first, tl.sum(tl.where(is_ours, taken // CHUNK, 0), 0)


@triton.jit
def _product(left, right):
    """Of numbers with the ten bits of TF32: no fewer than the rows that they were made of have."""
    return tl.dot(left, right, input_precision="tf32")


@triton.jit
def _decays(logs, CHUNK: tl.constexpr):
    """Of logarithms [CHUNK] what is left of the state before at each token and of each token at the end, both
    [CHUNK]; of each token at those behind it, [to, from], 0 for later ones; of a state behind all of them.

    Each of the spans is summed by itself: as a difference of sums, a weak decay behind strong ones would lose
    its digits.
    """
    at = tl.arange(0, CHUNK)
    to, start, token = at[:, None, None], at[None, :, None], at[None, None, :]
    spans = tl.sum(tl.where((token > start) & (token <= to), logs[None, None, :], 0.0), 2)
    left = tl.where(at[:, None] >= at[None, :], tl.exp(spans), 0.0)
    at_end = tl.sum(tl.where(at[:, None] == CHUNK - 1, left, 0.0), 0)
    return tl.exp(tl.cumsum(logs, 0)), at_end, left, tl.exp(tl.sum(logs, 0))


@triton.jit
def _settled(rights, weights, CHUNK: tl.constexpr):
    """The x of which x[i] = rights[i] less the sum of weights[i, j] x[j] over the j before i; [CHUNK, n]."""
    at = tl.arange(0, CHUNK)
    turned = tl.trans(weights)
    for place in tl.range(1, CHUNK):
        factors = tl.sum(tl.where(at[None, :] == place, turned, 0.0), 1)
        told = tl.sum(tl.where(at[:, None] < place, factors[:, None] * rights, 0.0), 0)
        rights = tl.where(at[:, None] == place, rights - told[None, :], rights)
    return rights


@triton.jit
def _with_pairs(
    pairs, asked, known, sums, HALF: tl.constexpr, CHUNK: tl.constexpr, KEYS_PADDED: tl.constexpr
):
    """Into `pairs`, by keys and by queries, of the HALF tokens behind each multiple of 2 HALF and those HALF
    that follow: what the latter find of the former, as what is left up to the middle and from there on."""
    at = tl.arange(0, CHUNK)
    apart = tl.reshape(sums, [CHUNK // (2 * HALF), 2 * HALF, KEYS_PADDED])
    is_middle = tl.arange(0, 2 * HALF)[None, :, None] == HALF - 1
    span = tl.abs(apart - tl.sum(tl.where(is_middle, apart, 0.0), 1)[:, None, :])
    left = tl.reshape(tl.exp(-span), [CHUNK, KEYS_PADDED])
    turned = tl.trans(known * left)
    group = at[:, None] // HALF
    is_pair = (group % 2 == 1) & (at[None, :] // HALF == group - 1)
    by_keys = tl.where(is_pair, _product(known * left, turned), pairs[0])
    return by_keys, tl.where(is_pair, _product(asked * left, turned), pairs[1])


@triton.jit
def _pairs_by_channel(asked, known, sums, CHUNK: tl.constexpr, KEYS_PADDED: tl.constexpr):
    """Of each key what a later key, and what a later or the same query finds of it, [to, from], with a decay
    for each channel: queries and keys are [CHUNK, KEYS], as are the `sums` of logarithms up to each token.

    Each factor is 1 or less: the inverse of a strong decay would be no number.
    """
    tl.static_assert(CHUNK == 16)
    at = tl.arange(0, CHUNK)
    own = tl.where(at[:, None] == at[None, :], tl.sum(asked * known, 1)[:, None], 0.0)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32), own
    pairs = _with_pairs(pairs, asked, known, sums, 8, CHUNK, KEYS_PADDED)
    pairs = _with_pairs(pairs, asked, known, sums, 4, CHUNK, KEYS_PADDED)
    pairs = _with_pairs(pairs, asked, known, sums, 2, CHUNK, KEYS_PADDED)
    return _with_pairs(pairs, asked, known, sums, 1, CHUNK, KEYS_PADDED)


@triton.jit
def _units(rows):
    """Each of length 1, as `mixer_kinds` makes queries and keys."""
    return rows * tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["num_runs"])
def gated_delta_chunks_kernel(
    rows,
    decays,
    bias,
    output,
    state,
    runs,
    num_runs,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE: tl.constexpr,
    BETA: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    RUNS_PADDED: tl.constexpr,
):
    """As `gated_delta_kernel`; grid (any, HEADS * blocks of COLUMNS values)."""
    blocks: tl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    key_width: tl.constexpr = HEADS // SHARE * KEYS
    head = tl.program_id(1) // blocks
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = keys < KEYS, columns < VALUES
    mask = is_key[:, None] & is_value[None, :]
    rate = tl.exp(tl.load(decays + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    number = tl.program_id(0)
    slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)
    while num_chunks > 0:
        places = state + (slot * HEADS + head) * KEYS * VALUES + keys[:, None] * VALUES + columns[None, :]
        held = tl.load(places, mask=mask, other=0.0)
        for chunk in tl.range(0, num_chunks):
            tokens = first + chunk * CHUNK + tl.arange(0, CHUNK)
            row = rows + tokens * STRIDE
            asked = row[:, None] + head // SHARE * KEYS + keys[None, :]
            values = row[:, None] + 2 * key_width + head * VALUES + columns[None, :]
            gates = row + 2 * key_width + HEADS * VALUES + head
            beta = tl.sigmoid(tl.load(gates).to(tl.float32)).to(rows.dtype.element_ty).to(tl.float32) * BETA
            logs = -rate * _softplus(tl.load(gates + HEADS).to(tl.float32) + shift)
            before, at_end, left, total = _decays(logs, CHUNK)
            key = _units(tl.load(asked + key_width, mask=is_key[None, :], other=0.0).to(tl.float32))
            turned = tl.trans(key)
            value = tl.load(values, mask=is_value[None, :], other=0.0).to(tl.float32)
            wrong = beta[:, None] * (value - before[:, None] * _product(key, held))
            fixed = _settled(wrong, beta[:, None] * left * _product(key, turned), CHUNK)
            query = _units(tl.load(asked, mask=is_key[None, :], other=0.0).to(tl.float32)) * SCALE
            told = left * _product(query, turned)
            said = before[:, None] * _product(query, held) + _product(told, fixed)
            held = held * total + _product(turned * at_end[None, :], fixed)
            own = (tokens * HEADS + head)[:, None] * VALUES + columns[None, :]
            tl.store(output + own, said.to(output.dtype.element_ty), mask=is_value[None, :])
        tl.store(places, held, mask=mask)
        number += tl.num_programs(0)
        slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)


@triton.jit(do_not_specialize=["num_runs", "least", "most"])
def gated_structured_chunks_kernel(
    rows,
    decays,
    bias,
    direct,
    output,
    state,
    runs,
    num_runs,
    least,
    most,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    RUNS_PADDED: tl.constexpr,
):
    """As `gated_structured_kernel`; grid (any, HEADS * blocks of ROWS of DIM)."""
    blocks: tl.constexpr = (DIM + ROWS - 1) // ROWS
    shared: tl.constexpr = HEADS // SHARE * SIZE
    head = tl.program_id(1) // blocks
    lines = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    is_line, is_column = lines < DIM, columns < SIZE
    mask = is_line[:, None] & is_column[None, :]
    rate = tl.exp(tl.load(decays + head).to(tl.float32))
    shift = tl.load(bias + head).to(tl.float32)
    past = tl.load(direct + head).to(tl.float32)
    number = tl.program_id(0)
    slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)
    while num_chunks > 0:
        places = state + (slot * HEADS + head) * DIM * SIZE + lines[:, None] * SIZE + columns[None, :]
        held = tl.load(places, mask=mask, other=0.0)
        for chunk in tl.range(0, num_chunks):
            tokens = first + chunk * CHUNK + tl.arange(0, CHUNK)
            row = rows + tokens * STRIDE
            given = row[:, None] + head * DIM + lines[None, :]
            given = tl.load(given, mask=is_line[None, :], other=0.0).to(tl.float32)
            gates = row[:, None] + HEADS * DIM + head // SHARE * SIZE + columns[None, :]
            step = _softplus(tl.load(row + HEADS * DIM + 2 * shared + head).to(tl.float32) + shift)
            step = tl.minimum(tl.maximum(step, least), most)
            before, at_end, left, total = _decays(-rate * step, CHUNK)
            b = tl.load(gates, mask=is_column[None, :], other=0.0).to(tl.float32)
            c = tl.load(gates + shared, mask=is_column[None, :], other=0.0).to(tl.float32)
            fed = step[:, None] * given
            told = left * _product(c, tl.trans(b))
            said = before[:, None] * _product(c, tl.trans(held)) + _product(told, fed)
            held = held * total + _product(tl.trans(fed * at_end[:, None]), b)
            own = (tokens * HEADS + head)[:, None] * DIM + lines[None, :]
            tl.store(output + own, said + given * past, mask=is_line[None, :])
        tl.store(places, held, mask=mask)
        number += tl.num_programs(0)
        slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)


@triton.jit(do_not_specialize=["num_runs"])
def delta_chunks_kernel(
    query,
    key,
    value,
    logs,
    beta,
    output,
    state,
    runs,
    num_runs,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    RUNS_PADDED: tl.constexpr,
):
    """As `delta_kernel` with decays BY_CHANNEL; grid (any, HEADS * blocks of COLUMNS values).

    Kimi Team, "Kimi Linear", 2025.
    """
    tl.static_assert(BY_CHANNEL)
    blocks: tl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // blocks
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = keys < KEYS, columns < VALUES
    mask = is_key[:, None] & is_value[None, :]
    number = tl.program_id(0)
    slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)
    while num_chunks > 0:
        places = state + (slot * HEADS + head) * KEYS * VALUES + keys[:, None] * VALUES + columns[None, :]
        held = tl.load(places, mask=mask, other=0.0)
        for chunk in tl.range(0, num_chunks):
            tokens = first + chunk * CHUNK + tl.arange(0, CHUNK)
            row = tokens * HEADS + head
            shared = (tokens * (HEADS // SHARE) + head // SHARE)[:, None] * KEYS + keys[None, :]
            own = row[:, None] * VALUES + columns[None, :]
            known = tl.load(key + shared, mask=is_key[None, :], other=0.0)
            asked = tl.load(query + shared, mask=is_key[None, :], other=0.0)
            lost = tl.load(logs + row[:, None] * KEYS + keys[None, :], mask=is_key[None, :], other=0.0)
            sums, total = tl.cumsum(lost, 0), tl.sum(lost, 0)
            weights, told = _pairs_by_channel(asked, known, sums, CHUNK, KEYS_PADDED)
            before, at_end = tl.exp(sums), tl.exp(-tl.abs(total[None, :] - sums))
            trust = tl.load(beta + row)[:, None]
            wanted = tl.load(value + own, mask=is_value[None, :], other=0.0).to(tl.float32)
            fixed = _settled(trust * (wanted - _product(known * before, held)), trust * weights, CHUNK)
            said = _product(asked * before, held) + _product(told, fixed)
            held = held * tl.exp(total)[:, None] + _product(tl.trans(known * at_end), fixed)
            tl.store(output + own, said.to(output.dtype.element_ty), mask=is_value[None, :])
        tl.store(places, held, mask=mask)
        number += tl.num_programs(0)
        slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)


@triton.jit(do_not_specialize=["num_runs"])
def structured_chunks_kernel(
    inputs,
    logs,
    b,
    c,
    output,
    state,
    runs,
    num_runs,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    RUNS_PADDED: tl.constexpr,
):
    """As `structured_kernel`; grid (any, HEADS * blocks of ROWS of DIM)."""
    blocks: tl.constexpr = (DIM + ROWS - 1) // ROWS
    head = tl.program_id(1) // blocks
    lines = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE_PADDED)
    is_line, is_column = lines < DIM, columns < SIZE
    mask = is_line[:, None] & is_column[None, :]
    number = tl.program_id(0)
    slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)
    while num_chunks > 0:
        places = state + (slot * HEADS + head) * DIM * SIZE + lines[:, None] * SIZE + columns[None, :]
        held = tl.load(places, mask=mask, other=0.0)
        for chunk in tl.range(0, num_chunks):
            tokens = first + chunk * CHUNK + tl.arange(0, CHUNK)
            row = tokens * HEADS + head
            shared = (tokens * (HEADS // SHARE) + head // SHARE)[:, None] * SIZE + columns[None, :]
            own = row[:, None] * DIM + lines[None, :]
            before, at_end, left, total = _decays(tl.load(logs + row), CHUNK)
            given = tl.load(b + shared, mask=is_column[None, :], other=0.0).to(tl.float32)
            asked = tl.load(c + shared, mask=is_column[None, :], other=0.0).to(tl.float32)
            fed = tl.load(inputs + own, mask=is_line[None, :], other=0.0).to(tl.float32)
            told = left * _product(asked, tl.trans(given))
            said = before[:, None] * _product(asked, tl.trans(held)) + _product(told, fed)
            held = held * total + _product(tl.trans(fed * at_end[:, None]), given)
            tl.store(output + own, said.to(output.dtype.element_ty), mask=is_line[None, :])
        tl.store(places, held, mask=mask)
        number += tl.num_programs(0)
        slot, first, num_chunks = _chunks_at(runs, num_runs, number, CHUNK, RUNS_PADDED)
