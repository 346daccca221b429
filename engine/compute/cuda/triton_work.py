"""How one step's attention is cut into equal pieces of work for a device of many processors.

Pure layout on the host. A sequence's new tokens are cut into tiles, and a tile's keys into runs where there
are fewer tiles than the device can work on at a time: a long context is then read by many (Flash-Decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.compute.attention.layer_kv import Reach
from engine.plan.step_records import Int32

Indices = NDArray[np.intp]

# The most keys at a time of a kernel for draft trees: three words of bits hold them, wherever they begin.
_MOST_TREE_KEYS = 64
# The most of a kernel whose tiles have many rows, over keys in bytes: more of them outgrow its registers.
_MOST_BYTE_KEYS, _MANY_ROWS = 64, 128
_NOBODY = np.zeros(0, np.intp)
_NO_ITEMS, _NO_MERGES = np.zeros((0, 5), np.int32), np.zeros((0, 4), np.int32)


class HeadShape(NamedTuple):
    """What makes the work of two layers differ: their heads and how far back they see."""

    num_heads: int
    num_kv_heads: int
    reach: Reach | None

    @property
    def group(self) -> int:
        """Heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads


class TileKind(NamedTuple):
    """Sequences of up to `max_queries` new tokens are cut into tiles of `queries`.

    Where a K/V head's heads share a tile its keys are read once for all of them: worth it until the tile's
    arithmetic takes longer than the reading. `min_run` is the fewest keys worth a program of their own, and
    `programs` how many programs are wanted for each of the device's processors. Its `keys` are worked on at a
    time, `stages` such steps on their way at once; a run begins at a multiple of them. `expects_trees` has
    its kernel made for draft trees even before there is one.
    """

    name: str
    max_queries: int
    queries: int
    max_heads: int
    min_run: int
    programs: int
    keys: int = 64
    stages: int = 3
    expects_trees: bool = False

    def heads(self, group: int) -> int:
        """How many of the `group` heads that share a K/V head one tile takes."""
        return min(group, self.max_heads)

    def keys_at_once(self, *, has_trees: bool, in_bytes: bool = False) -> int:
        """How many keys one step of its kernel takes."""
        is_full = in_bytes and self.queries >= _MANY_ROWS
        most = _MOST_BYTE_KEYS if is_full else self.keys
        return min(most, self.keys, _MOST_TREE_KEYS) if has_trees else min(most, self.keys)

    def programs_of_an_item(self, shape: HeadShape) -> int:
        """How many programs the heads of one item take."""
        return shape.num_kv_heads * -(-shape.group // self.heads(shape.group))


# The fastest of some forty on an H200 with Llama 8B's heads, from one sequence of 1,024 tokens to 128.
_HALF_PRECISION = (
    TileKind("decode", 1, queries=1, max_heads=64, min_run=128, programs=2, keys=128, stages=2),
    TileKind("verify", 48, queries=16, max_heads=8, min_run=256, programs=2, expects_trees=True),
    TileKind("prefill", 1 << 30, queries=128, max_heads=1, min_run=1024, programs=1, keys=128),
)
# A product of float32 is made of three, whose parts fill the registers and the shared memory.
_FULL_PRECISION = (
    TileKind("decode", 1, queries=1, max_heads=16, min_run=128, programs=4),
    TileKind("verify", 48, queries=16, max_heads=2, min_run=256, programs=2, expects_trees=True),
    TileKind("prefill", 1 << 30, queries=32, max_heads=1, min_run=1024, programs=1),
)


class Workforce(NamedTuple):
    """Whom work is cut for: so many processors, which take tiles of these kinds."""

    processors: int
    kinds: tuple[TileKind, ...]

    @classmethod
    def of(cls, processors: int, itemsize: int) -> Workforce:
        """For keys and values of `itemsize` bytes."""
        return cls(processors, _HALF_PRECISION if itemsize <= 2 else _FULL_PRECISION)

    def fewest_queries(self, kind: TileKind) -> int:
        """How many new tokens a sequence has at least that is cut into tiles of this kind."""
        smaller = (each.max_queries for each in self.kinds if each.max_queries < kind.max_queries)
        return 1 + max(smaller, default=0)


class StepLengths(NamedTuple):
    """A step's sequences as far as work depends on them. `has_tree` marks drafts that are no chain."""

    query_lens: Indices  # [S]
    kv_lens: Indices  # [S]
    has_tree: NDArray[np.bool_]  # [S]

    @property
    def first_tokens(self) -> Indices:
        """Where each sequence's new tokens begin, [S]."""
        return self.query_lens.cumsum() - self.query_lens


@dataclass(frozen=True, slots=True)
class Work:
    """All there is to do in a step for the layers of one shape.

    An item of a kind is (row of the tables, first query, first key, key behind the last, first partial row or
    -1), the longest first. A partial row holds the softmax of one query over one run; a merge is (token,
    first partial row, distance to the next run's, runs).
    """

    items: tuple[Int32, ...]  # of each kind [W, 5]
    merges: Int32  # [T, 4]
    num_partials: int

    def with_keys_to_come(self, lengths: StepLengths, num_keys: int) -> Work:
        """The same for steps that are to follow over the same tables, in which each sequence has more keys.

        The last run of each is longer by as many; in a step it ends where the keys do.
        """
        items = tuple(each.copy() for each in self.items)
        for each in items:
            each[:, 3] += num_keys * (each[:, 3] == lengths.kv_lens[each[:, 0]])
        return replace(self, items=items)


def cut_work(lengths: StepLengths, shape: HeadShape, workforce: Workforce) -> Work:
    """The work of every token, each (token, visible key) in exactly one item."""
    items, merges, num_partials = [], [_NO_MERGES], 0
    longest, fewest = int(lengths.query_lens.max(initial=0)), 0
    for kind in workforce.kinds:
        members = _members(lengths.query_lens, fewest, kind) if longest > fewest else _NOBODY
        fewest = kind.max_queries
        if not len(members):
            items.append(_NO_ITEMS)
            continue
        tiles = _Tiles(lengths, members, kind, shape.reach)
        programs = kind.programs_of_an_item(shape)
        runs = _Runs(tiles, _run_length(tiles, kind, programs, workforce.processors), num_partials)
        items.append(runs.items())
        merges.append(runs.merges())
        num_partials = runs.num_partials
    return Work(tuple(items), np.concatenate(merges), num_partials)


def _members(query_lens: Indices, fewest: int, kind: TileKind) -> Indices:
    """The sequences of more than `fewest` new tokens that the kind takes."""
    return ((query_lens > fewest) & (query_lens <= kind.max_queries)).nonzero()[0]


class _Tiles:
    """The tiles of `members`, [tiles] each: sequence, first query, number of queries, keys that they see."""

    def __init__(self, lengths: StepLengths, members: Indices, kind: TileKind, reach: Reach | None) -> None:
        query_lens = lengths.query_lens[members]
        contexts, first_tokens = lengths.kv_lens[members] - query_lens, lengths.first_tokens[members]
        if int(query_lens.max()) <= kind.queries:  # a tile each
            self.sequence, self.first_query, self.queries = members, np.zeros_like(members), query_lens
        else:
            counts = -(-query_lens // kind.queries)
            self.sequence = members.repeat(counts)
            self.first_query = _count_up(counts) * kind.queries
            contexts, first_tokens = contexts.repeat(counts), first_tokens.repeat(counts)
            self.queries = np.minimum(kind.queries, query_lens.repeat(counts) - self.first_query)
        self.first_token = first_tokens + self.first_query
        self.stop = contexts + self.first_query + self.queries
        self.start = np.zeros_like(self.stop)
        if reach is not None:  # in a tree every draft may be as near to the newest token as the first
            behind = np.where(lengths.has_tree[self.sequence], 0, self.first_query)
            self.start = np.maximum(reach.first(contexts + behind), 0) // kind.keys * kind.keys


class _Runs:
    """The keys of `tiles` in runs that end at multiples of `length`."""

    def __init__(self, tiles: _Tiles, length: int, first_partial: int) -> None:
        first = tiles.start // length
        self._tiles = tiles
        self._length = length
        self._first = first
        self._counts = (tiles.stop - 1) // length - first + 1
        self._are_cut = int(self._counts.max()) > 1
        rows = self._counts * tiles.queries * (self._counts > 1)
        self._bases = first_partial + rows.cumsum() - rows
        self.num_partials = first_partial + int(rows.sum())

    def items(self) -> Int32:
        """[runs, 5], the longest first."""
        tiles, counts = self._tiles, self._counts
        if not self._are_cut:
            lengths = tiles.start - tiles.stop
            return _columns(lengths, tiles.sequence, tiles.first_query, tiles.start, tiles.stop, -1)
        tile = np.arange(len(counts)).repeat(counts)
        run = _count_up(counts)
        border = (self._first[tile] + run) * self._length
        start = np.maximum(border, tiles.start[tile])
        stop = np.minimum(border + self._length, tiles.stop[tile])
        partial = np.where(counts[tile] > 1, self._bases[tile] + run * tiles.queries[tile], -1)
        return _columns(start - stop, tiles.sequence[tile], tiles.first_query[tile], start, stop, partial)

    def merges(self) -> Int32:
        """[tokens of the tiles with several runs, 4]."""
        if not self._are_cut:
            return _NO_MERGES
        tiles = self._tiles
        several = (self._counts > 1).nonzero()[0]
        queries = tiles.queries[several]
        tile, query = several.repeat(queries), _count_up(queries)
        first, partial = tiles.first_token[tile] + query, self._bases[tile] + query
        return _columns(None, first, partial, tiles.queries[tile], self._counts[tile])


def _run_length(tiles: _Tiles, kind: TileKind, programs_of_a_run: int, processors: int) -> int:
    """The power of two that gives each wanted program about as many keys as all the others."""
    keys = int((tiles.stop - tiles.start).sum()) * programs_of_a_run
    share = -(-keys // (processors * kind.programs))
    return max(kind.min_run, 1 << max(share - 1, 0).bit_length())


def max_items(kind: TileKind, max_sequences: int, max_tokens: int, shape: HeadShape, processors: int) -> int:
    """At least as many items of a kind as a step of up to that size can have."""
    of_a_sequence = -(-kind.max_queries // kind.queries)
    tiles = min(max_tokens, max_sequences + max_tokens // kind.queries, max_sequences * of_a_sequence)
    return 2 * tiles + -(-processors * kind.programs // kind.programs_of_an_item(shape))


def max_partials(workforce: Workforce, num_items: Sequence[int], num_tokens: int, shape: HeadShape) -> int:
    """At least as many partial rows as a step of up to `num_tokens` has in up to `num_items` of each kind.

    A run is so long that the keys of all tiles of a kind would fill no more runs than it has programs wanted,
    for the heads of an item together (`_run_length`). Runs end at fixed borders: a tile of n keys lies in
    less than n / length + 2 of them, and its queries have a row in each. So all kinds have together at most
    two rows for each token, and beside these each kind a row for each query of as many tiles as runs are
    wanted.

    Where keys begin at 0 only the last run of a tile is not full, which makes it one row for each token. And
    a tile is cut where it fills more than one run, into less than twice what it fills: a kind has no more
    rows than that, whatever its tokens.
    """
    by_items = by_tokens = 0
    for kind, most in zip(workforce.kinds, num_items, strict=True):
        runs = -(-workforce.processors * kind.programs // kind.programs_of_an_item(shape))
        filled = most if shape.reach is not None else min(most, 2 * runs)
        by_items += filled * kind.queries
        by_tokens += min(most, runs) * kind.queries
    return min(by_items, by_tokens + num_tokens * (1 if shape.reach is None else 2))


def _count_up(counts: Indices) -> Indices:
    """0, 1, … for each of `counts` in turn: [sum of counts]."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) - (ends - counts).repeat(counts)


def _columns(keys: Indices | None, *columns: Indices | int) -> Int32:
    """[rows, columns] in the order of `keys`, of equal ones as they are."""
    first = columns[0]
    assert not isinstance(first, int), "a column says how many rows there are"
    table = np.empty((len(first), len(columns)), np.int32)
    for number, column in enumerate(columns):
        table[:, number] = column
    return table if keys is None else table[keys.argsort(kind="stable")]
