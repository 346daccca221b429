"""The device code of paged attention, in Triton: attend to a run of keys, merge such runs, store new tokens.

After FlashAttention-2 (Dao 2023): a tile of queries passes once over its keys with a running softmax. After
Flash-Decoding (Dao et al. 2023): where that would leave the device idle the keys are split into runs, each
with a softmax of its own, which are merged. After PagedAttention (Kwon et al. 2023): keys lie in blocks.

Shapes are those of KvTensors and StepTables; a TritonTile holds the constants. Scores are kept in base 2, so
`scale` carries the factor log2(e), or `cap` where there is one. Nothing here waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.compute.cuda.triton_pages import as_numbers, scale_pointers, scales_before

ITEM_COLUMNS = tl.constexpr(5)
MERGE_COLUMNS = tl.constexpr(4)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(
    tensor,
    head,
    slots,
    wanted,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of the rows in `slots`, counted through all heads, COUNT numbers of DIM from FIRST on: [rows, PADDED].

    Zeros where one is not wanted.
    """
    dims = tl.arange(0, PADDED)[None, :]
    if TILE.pages == "plain":
        pointers = tensor + slots[:, None] * DIM + FIRST + dims
    else:
        pointers = tensor + (slots * DIM + scales_before(head, TILE.block_size))[:, None] + FIRST + dims
    if MASKED:
        mask = wanted[:, None]
        if COUNT != PADDED:
            mask = mask & (dims < COUNT)
        return tl.load(pointers, mask=mask, other=0.0)
    if COUNT != PADDED:
        return tl.load(pointers, mask=dims < COUNT, other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_query(rows, is_row, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """COUNT numbers of each query from FIRST on: [rows, PADDED]."""
    dims = tl.arange(0, PADDED)[None, :]
    return tl.load(rows[:, None] + FIRST + dims, mask=is_row[:, None] & (dims < COUNT), other=0.0)


@triton.jit
def _tree_word(tree_row, word, tree_bits, tree_words):
    """A word of each row's bits [rows]: all ones before the newest token, and for rows of no tree."""
    words = word + tl.zeros_like(tree_row)  # a block: the interpreter takes no mask made of scalars
    mask = (tree_row >= 0) & (words >= 0) & (words < tree_words)
    return tl.load(tree_bits + tree_row * tree_words + words, mask=mask, other=-1)[:, None]


@triton.jit
def _follows(tree_row, first_place, tree_bits, tree_words, KEYS: tl.constexpr):
    """Which of KEYS places from `first_place` on each row follows in its tree, or is: [rows, KEYS]."""
    tl.static_assert(KEYS <= 64)  # three words hold them, wherever they begin
    word = first_place >> 5
    bit = ((first_place & 31) + tl.arange(0, KEYS))[None, :]
    first = _tree_word(tree_row, word, tree_bits, tree_words)
    second = _tree_word(tree_row, word + 1, tree_bits, tree_words)
    third = _tree_word(tree_row, word + 2, tree_bits, tree_words)
    words = tl.where(bit < 32, first, tl.where(bit < 64, second, third))
    return ((words >> (bit & 31)) & 1) != 0


@triton.jit
def _first_seen(position, window, TILE: tl.constexpr):
    """The first position that a token at `position` sees of its window, or of its chunk of that size."""
    if TILE.in_chunks:
        return position - position % window
    return position - window + 1


@triton.jit
def _visible(start, wanted, rows, sequence, window, TILE: tl.constexpr):
    """Which of the `wanted` keys from `start` on each row sees: [rows, keys]."""
    slot, position, tree_row = rows
    context, positions, tree_bits, tree_words = sequence
    key = start + tl.arange(0, TILE.keys)
    visible = wanted[None, :] & (key[None, :] <= slot[:, None])
    if TILE.has_trees:
        visible = visible & _follows(tree_row, start - context, tree_bits, tree_words, TILE.keys)
    if TILE.has_window:
        if TILE.has_trees:  # the window counts depth, as positions do
            is_new = wanted & (key >= context)
            key = tl.load(positions + key - context, mask=is_new, other=0) + tl.where(is_new, 0, key)
        visible = visible & (key[None, :] >= _first_seen(position, window, TILE)[:, None])
    return visible


@triton.jit
def _load_scales(pages, head, offset, wanted, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """What each row of bytes is multiplied with: [1, rows]."""
    pointers = scale_pointers(pages, head, offset, DIM, TILE.block_size)
    if MASKED:
        return tl.load(pointers, mask=wanted, other=0.0)[None, :]
    return tl.load(pointers)[None, :]


@triton.jit
def _sweep(
    state,
    first,
    stop,
    readable,
    query,
    cache,
    scaling,
    rows,
    sequence,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys [first, stop) into the running (sum of values, highest score, weight) of each row.

    `query` is the rows' queries twice, or with values in keys what meets these and what meets the rest. With
    MASKED, keys outside `readable` are not even loaded: what lies there may be no number. A row's scale is
    taken to its score, or to its weight: there it is one product for all of the row's numbers. Weights of
    values in bytes are bfloat16 where others are of 16 bits: scaled ones may be too small for float16.
    """
    total, highest, weight = state
    readable_first, readable_stop = readable
    keys, values, table, kv_head = cache
    scale, cap, window = scaling
    # Loading ahead pays in long sweeps; of a few keys' tree bits it would only fill registers.
    STAGES: tl.constexpr = 1 if MASKED and TILE.has_trees else None
    PAGES: tl.constexpr = TILE.pages
    IN_BYTES: tl.constexpr = PAGES != "plain"
    leading, rest = query
    KIND: tl.constexpr = leading.dtype
    VALUE_TYPE: tl.constexpr = tl.float32 if leading.dtype == tl.float32 else tl.bfloat16
    KEY_DIM: tl.constexpr = TILE.key_dim
    VALUE_DIM: tl.constexpr = TILE.value_dim
    COLUMNS: tl.constexpr = TILE.padded_value_dim
    for start in tl.range(first, stop, TILE.keys, num_stages=STAGES):
        key = start + tl.arange(0, TILE.keys)
        wanted = (key >= readable_first) & (key < readable_stop)
        if MASKED:
            block = tl.load(table + key // TILE.block_size, mask=wanted, other=0)
        else:
            block = tl.load(table + key // TILE.block_size)
        head, offset = block.to(tl.int64) * TILE.num_kv_heads + kv_head, key % TILE.block_size
        slots = head * TILE.block_size + offset
        if TILE.value_in_key:
            REST: tl.constexpr = KEY_DIM - VALUE_DIM
            value_rows = _load_rows(keys, head, slots, wanted, KEY_DIM, 0, VALUE_DIM, COLUMNS, TILE, MASKED)
            key_rows = _load_rows(
                keys, head, slots, wanted, KEY_DIM, VALUE_DIM, REST, TILE.padded_rest_dim, TILE, MASKED
            )
            scores = tl.dot(leading, tl.trans(as_numbers(value_rows, KIND, PAGES)), input_precision="tf32x3")
            key_tile = as_numbers(key_rows, KIND, PAGES)
            scores = tl.dot(rest, tl.trans(key_tile), scores, input_precision="tf32x3") * scale
        else:
            key_rows = _load_rows(
                keys, head, slots, wanted, KEY_DIM, 0, KEY_DIM, TILE.padded_key_dim, TILE, MASKED
            )
            key_tile = as_numbers(key_rows, KIND, PAGES)
            scores = tl.dot(leading, tl.trans(key_tile), input_precision="tf32x3") * scale
        if IN_BYTES:
            key_scales = _load_scales(keys, head, offset, wanted, KEY_DIM, TILE, MASKED)
            scores *= key_scales
        if TILE.has_cap:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)  # the hyperbolic tangent
        if MASKED:
            scores = tl.where(_visible(start, wanted, rows, sequence, window, TILE), scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen yet: no inf - inf
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        if not TILE.value_in_key:
            value_rows = _load_rows(
                values, head, slots, wanted, VALUE_DIM, 0, VALUE_DIM, COLUMNS, TILE, MASKED
            )
        value_tile = as_numbers(value_rows, VALUE_TYPE, PAGES)
        if IN_BYTES:
            if TILE.value_in_key:  # of a sick row, whose values are zeros, the scale is NaN
                value_scales = tl.where(key_scales == key_scales, key_scales, 0.0)
            else:
                value_scales = _load_scales(values, head, offset, wanted, VALUE_DIM, TILE, MASKED)
            weights *= value_scales
        total = total * shrink[:, None]
        total = tl.dot(weights.to(value_tile.dtype), value_tile, total, input_precision="tf32x3")
        highest = new_highest
    return total, highest, weight


@triton.jit
def _plain_keys(first_key, stop_key, oldest, newest, window, TILE: tl.constexpr):
    """The keys of an item that every row sees and none needs a mask for, in whole steps: (first, stop).

    They are those up to the `oldest` query, less what the window of the `newest` one hides.
    """
    first = first_key
    if TILE.has_window:
        seen = _first_seen(newest, window, TILE)
        first = tl.maximum(seen + TILE.keys - 1, first_key) // TILE.keys * TILE.keys
        first = tl.minimum(first, stop_key)
    stop = tl.minimum(oldest + 1, stop_key) // TILE.keys * TILE.keys
    return first, tl.maximum(stop, first)


@triton.jit
def _beside_sink(highest, weight, sink):
    """By what sums are multiplied, and the weight they are divided by, where `sink` takes part in a softmax.

    `sink` is in base 2, as `highest` is.
    """
    top = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - top)
    return shrink, weight * shrink + tl.exp2(sink - top)


@triton.jit
def _store_result(targets, state, sinks, first_partial, token, head, is_row, in_tile, TILE: tl.constexpr):
    """Store the finished rows of a tile, or what a merge will finish."""
    COLUMNS: tl.constexpr = TILE.padded_value_dim
    output, partial_sums, partial_weights = targets
    total, highest, weight = state
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = is_row[:, None] & (columns < TILE.value_dim)
    num_heads = TILE.num_kv_heads * TILE.group
    if first_partial < 0:
        rows = token * num_heads + head
        if TILE.has_sinks:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            shrink, weight = _beside_sink(highest, weight, sink)
            total = total * shrink[:, None]
        finished = (total / weight[:, None]).to(output.dtype.element_ty)
        tl.store(output + rows[:, None] * TILE.value_dim + columns, finished, mask=mask)
    else:
        rows = (first_partial + in_tile).to(tl.int64) * num_heads + head
        tl.store(partial_sums + rows[:, None] * TILE.value_dim + columns, total, mask=mask)
        tl.store(partial_weights + rows * 2, highest, mask=is_row)
        tl.store(partial_weights + rows * 2 + 1, weight, mask=is_row)


@triton.jit(do_not_specialize=["window", "tree_words"])
def attend_kernel(
    query,
    keys,
    values,
    output,
    partial_sums,
    partial_weights,
    sinks,
    items,
    block_tables,
    table_starts,
    query_starts,
    kv_lens,
    positions,
    tree_rows,
    tree_bits,
    scale,
    cap,
    window,
    query_token_stride,
    query_head_stride,
    tree_words,
    TILE: tl.constexpr,
):
    """One tile of a work item's heads and queries; grid (num_kv_heads * head_tiles * query_tiles * items).

    One dimension, since a device takes only 65,535 programs along any other: the tiles of an item first.

    Writes `output` [N, heads, value_dim], or the item's unfinished softmax to `partial_sums` [P, heads,
    value_dim] and `partial_weights` [P, heads, 2] as (highest, weight). Sequence -1 is no item.
    """
    tile = tl.program_id(0) % TILE.programs
    item = items + tl.program_id(0) // TILE.programs * ITEM_COLUMNS
    head_tile = tile // TILE.query_tiles
    row_of_tables = tl.load(item)
    if row_of_tables < 0:
        return
    first_query, first_key, stop_key = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_partial = tl.load(item + 4)
    query_start = tl.load(query_starts + row_of_tables)
    query_len = tl.load(query_starts + row_of_tables + 1) - query_start
    context = tl.load(kv_lens + row_of_tables) - query_len
    if TILE.query_tiles > 1:
        before = tile % TILE.query_tiles * TILE.queries
        first_query += before
        if first_query >= query_len:
            return
        first_partial += tl.where(first_partial < 0, 0, before)
    stop_key = tl.minimum(stop_key, context + first_query + TILE.queries)  # work may be laid out for more

    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.padded_value_dim
    kv_head = head_tile // TILE.head_tiles
    row = tl.arange(0, ROWS)
    in_group = head_tile % TILE.head_tiles * TILE.heads + row % TILE.heads
    in_tile = row // TILE.heads
    place = first_query + in_tile
    is_row = (in_tile < TILE.queries) & (place < query_len) & (in_group < TILE.group)
    token = (query_start + place).to(tl.int64)
    head = kv_head * TILE.group + in_group
    query_rows = query + token * query_token_stride + head.to(tl.int64) * query_head_stride
    if TILE.value_in_key:
        REST: tl.constexpr = TILE.key_dim - TILE.value_dim
        leading = _load_query(query_rows, is_row, 0, TILE.value_dim, COLUMNS)
        rest = _load_query(query_rows, is_row, TILE.value_dim, REST, TILE.padded_rest_dim)
    else:
        leading = _load_query(query_rows, is_row, 0, TILE.key_dim, TILE.padded_key_dim)
        rest = leading
    query_tile = (leading, rest)

    slot = context + place
    position = slot
    tree_row = tl.full([ROWS], -1, tl.int32)
    oldest = context + first_query
    if TILE.has_trees:
        first_tree_row = tl.load(tree_rows + row_of_tables)
        position = tl.load(positions + token, mask=is_row, other=0)
        tree_row = tl.where(is_row & (first_tree_row >= 0), first_tree_row + place, -1)
        oldest = tl.where(first_tree_row >= 0, context, oldest)

    newest = context + tl.minimum(first_query + TILE.queries, query_len) - 1
    plain_first, plain_stop = _plain_keys(first_key, stop_key, oldest, newest, window, TILE)
    readable_first = first_key
    if TILE.has_window:
        readable_first = tl.maximum(_first_seen(oldest, window, TILE), first_key)
    readable = (readable_first, stop_key)
    cache = (keys, values, block_tables + tl.load(table_starts + row_of_tables), kv_head)
    scaling = (scale, cap, window)
    rows = (slot, position, tree_row)
    sequence = (context, positions + query_start, tree_bits, tree_words)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    state = (total, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32))
    if TILE.has_window:
        state = _sweep(
            state, first_key, plain_first, readable, query_tile, cache, scaling, rows, sequence, TILE, True
        )
    state = _sweep(
        state, plain_first, plain_stop, readable, query_tile, cache, scaling, rows, sequence, TILE, False
    )
    state = _sweep(
        state, plain_stop, stop_key, readable, query_tile, cache, scaling, rows, sequence, TILE, True
    )
    targets = (output, partial_sums, partial_weights)
    _store_result(targets, state, sinks, first_partial, token, head, is_row, in_tile, TILE)


@triton.jit
def merge_kernel(
    partial_sums,
    partial_weights,
    output,
    sinks,
    merges,
    slots,
    HAS_SINKS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Put the runs of one token and head together, in the order of their keys; grid (heads * merges).

    Token -1 is no merge. With HAS_PADDING there are as many merges as rows of `output`, and the rows whose
    slot is -1, which no query fills, become zero.
    """
    place, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    dims = tl.arange(0, PADDED)
    if HAS_PADDING:  # noqa: SIM102 - known when compiled, what follows is not
        if tl.load(slots + place) < 0:
            padding = (place.to(tl.int64) * NUM_HEADS + head) * DIM + dims
            tl.store(output + padding, tl.zeros([PADDED], output.dtype.element_ty), mask=dims < DIM)
    merge = merges + place * MERGE_COLUMNS
    token = tl.load(merge)
    if token < 0:
        return
    first, stride, count = tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    total = tl.zeros([PADDED], tl.float32)
    highest = float("-inf")
    weight = 0.0
    for start in range(0, count, AT_ONCE):
        run = start + tl.arange(0, AT_ONCE)
        partial = (first + run * stride).to(tl.int64) * NUM_HEADS + head
        maxima = tl.load(partial_weights + partial * 2, mask=run < count, other=float("-inf"))
        weights = tl.load(partial_weights + partial * 2 + 1, mask=run < count, other=0.0)
        mask = (run < count)[:, None] & (dims < DIM)[None, :]
        sums = tl.load(partial_sums + partial[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(maxima, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - base)
        share = tl.exp2(maxima - base)
        total = total * shrink + tl.sum(sums * share[:, None], 0)
        weight = weight * shrink + tl.sum(weights * share, 0)
        highest = new_highest
    if HAS_SINKS:
        shrink, weight = _beside_sink(highest, weight, tl.load(sinks + head).to(tl.float32) * LOG2_E)
        total = total * shrink
    target = (token.to(tl.int64) * NUM_HEADS + head) * DIM + dims
    tl.store(output + target, (total / weight).to(output.dtype.element_ty), mask=dims < DIM)
