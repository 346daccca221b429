"""How one step's sequences are put together so that a layer needs only a few large operations.

Pure layout: computed once a step from lengths and block tables, the same for all layers of one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import Reach
from engine.compute.attention.tree_mask import TreeMask, tree_masks
from engine.plan.step_records import StepInputs

Indices = NDArray[np.intp]

# Measured on two cores: one more group costs a layer about as much as reading this many bytes of padding.
_GROUP_COST_BYTES = 1 << 20
# A group also pays for attending from repeated queries to this many keys for each one it could have read.
# Measured for eight sequences of 2 to 9 tokens: 12 % less than a group for each length.
_ATTENDED_FOR_A_READ = 2
# Beyond this many bytes of keys and values, or query tokens, a group's operands fall out of the cache.
_MAX_GROUP_BYTES = 8 << 20
_MAX_GROUP_TOKENS = 256
# A long chunk is cut into query tiles: scores stay in the cache, and keys after a tile are not even read.
_LONG_CONTEXT = 512
_TILE_TOKENS, _LONG_CONTEXT_TILE_TOKENS = 128, 64
# Up to this many keys in all, one fused call costs less than the three operations it replaces.
_FUSED_KEYS = 1536


@dataclass(slots=True)
class Tile:
    """`queries` of each sequence of a group, and the `blocks` [n, max_blocks] that hold the keys they see.

    `mask` [n, 1, tile, 1, width] is added to the scores of the last `width` positions of the blocks; None
    when every query sees all. `fused` marks a tile so small that one call is cheapest; its mask spans all.
    """

    queries: slice
    blocks: torch.Tensor
    mask: torch.Tensor | None
    fused: bool
    _find_positions: Callable[[], Indices]
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    def positions(self) -> torch.Tensor:
        """Where the keys of the blocks are in their sequences: int64 [n, max_blocks * block_size].

        Drafts of a tree may be at the same place; those that no query sees may be anywhere.
        """
        return torch.from_numpy(self._find_positions())

    def index(self, kv: KvTensors, num_kv_heads: int) -> torch.Tensor:
        """What `KvTensors.gather` takes for a layer of `num_kv_heads`; made once a step."""
        index = self._indices.get(num_kv_heads)
        if index is None:
            index = self._indices[num_kv_heads] = kv.head_index(self.blocks, num_kv_heads)
        return index


class QueryGroup:
    """Sequences of similar query length and similar context, attended together.

    Shorter ones repeat their last token until they have `query_len`. `rows` of the packed query hold the
    group's tokens, sequence after sequence: a slice when it lies there in one run. `targets` are the rows
    that get the result, where repetitions go to the row behind the last token; None without any.
    """

    def __init__(
        self,
        inputs: StepInputs,
        kv: KvTensors,
        members: Indices,
        starts: Indices,
        trees: Mapping[int, TreeMask],
    ) -> None:
        self.num_sequences = len(members)
        self._query_lens = inputs.query_lens[members].astype(np.int64)
        self.query_len = int(self._query_lens.max())
        self.rows, self.targets = _packed_rows(starts[members], self._query_lens, len(inputs.token_ids))
        self._kv_lens = inputs.kv_lens[members].astype(np.int64)
        self._contexts = self._kv_lens - self._query_lens
        self._tables = inputs.block_tables[members]
        self._kv = kv
        self._trees = {row: trees[member] for row, member in enumerate(members) if member in trees}
        self._tiles: dict[Reach | None, list[Tile]] = {}

    def tiles(self, reach: Reach | None) -> list[Tile]:
        """The tiles, in order, for layers of one `reach`; made once a step."""
        found = self._tiles.get(reach)
        if found is None:
            size = _TILE_TOKENS if self._kv_lens.max() <= _LONG_CONTEXT else _LONG_CONTEXT_TILE_TOKENS
            firsts = range(0, self.query_len, size)
            found = [self._tile(slice(first, min(first + size, self.query_len)), reach) for first in firsts]
            self._tiles[reach] = found
        return found

    def _tile(self, queries: slice, reach: Reach | None) -> Tile:
        block_size = self._kv.block_size
        offsets = np.minimum(np.arange(queries.start, queries.stop), self._query_lens[:, None] - 1)
        places = self._contexts[:, None] + offsets  # [n, tile]
        first_seen = np.zeros_like(self._contexts)
        if reach is not None:
            first_seen = np.maximum(reach.first(self._oldest(places)), 0)
        first_block = first_seen // block_size
        last_block = places[:, -1] // block_size
        columns = first_block[:, None] + np.arange((last_block - first_block).max() + 1)  # [n, max_blocks]
        # Padding repeats a block of the sequence's own: another's may hold NaN, which no mask can contain.
        blocks = np.take_along_axis(self._tables, np.minimum(columns, last_block[:, None]), axis=1)
        num_keys = blocks.shape[1] * block_size
        fused = self.query_len == 1 and self.num_sequences * num_keys <= _FUSED_KEYS
        mask = self._mask(offsets, first_block * block_size, num_keys, reach, fused)
        positions = partial(self._positions, first_block * block_size, num_keys)
        return Tile(queries, torch.tensor(blocks, dtype=torch.long), mask, fused, positions)

    def _positions(self, origins: NDArray[np.int64], num_keys: int) -> Indices:
        """Where `num_keys` keys of each sequence are that begin at place `origins` [n]: [n, num_keys]."""
        places = origins[:, None] + np.arange(num_keys)
        for row, tree in self._trees.items():
            newest = int(self._contexts[row])
            places[row] = newest + tree.depths(places[row] - newest)
        return places

    def _oldest(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position that none of the queries at `places` [n, tile] is before: [n]."""
        return self._contexts if self._trees else places[:, 0]

    def _mask(
        self, offsets: Indices, origins: NDArray[np.int64], num_keys: int, reach: Reach | None, whole: bool
    ) -> torch.Tensor | None:
        """The additive mask of each sequence's queries `offsets` [n, tile] among its keys from `origins` on.

        Leaves out the first places if every query sees them, unless `whole`; None if nothing is hidden.
        """
        newest = self._contexts - origins
        queries = newest[:, None] + offsets  # [n, tile]
        first = int((newest if self._trees else queries[:, 0]).min()) + 1
        if reach is not None and (reach.first(queries + origins[:, None]) > origins[:, None]).any():
            first = 0
        if first >= num_keys:
            return None
        keys = np.arange(0 if whole else first, num_keys)
        hidden = keys > queries[..., None]  # [n, tile, width]
        if reach is not None:
            hidden |= keys < reach.first(queries + origins[:, None])[..., None] - origins[:, None, None]
        for row, tree in self._trees.items():
            hidden[row] = ~tree.sees(offsets[row], keys - newest[row], reach, int(self._contexts[row]))
        mask = torch.zeros(hidden.shape, dtype=self._kv.compute_dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None, :, None]


def group_sequences(inputs: StepInputs, kv: KvTensors) -> list[QueryGroup]:
    """Every sequence in exactly one group; padding is bounded by what another group would cost."""
    everyone = np.arange(len(inputs.query_lens))
    starts = np.cumsum(inputs.query_lens, dtype=np.intp) - inputs.query_lens
    trees = tree_masks(inputs)
    layer = kv.layers[0]
    token_bytes = layer.num_kv_heads * (layer.key_dim + layer.value_dim) * kv.compute_dtype.itemsize
    groups = []
    for members in _similar(inputs, everyone, _GROUP_COST_BYTES // token_bytes):
        longest = int(inputs.kv_lens[members].max())
        query_len = int(inputs.query_lens[members].max())
        size = max(1, min(_MAX_GROUP_TOKENS // query_len, _MAX_GROUP_BYTES // (token_bytes * longest)))
        for first in range(0, len(members), size):
            groups.append(QueryGroup(inputs, kv, members[first : first + size], starts, trees))
    return groups


def _similar(inputs: StepInputs, everyone: Indices, cost: int) -> Iterator[Indices]:
    """The sequences by query length and context, where a group costs as much as reading `cost` tokens."""
    for members in _split(everyone, inputs.query_lens, inputs.kv_lens, cost * _ATTENDED_FOR_A_READ):
        yield from _split(members, inputs.kv_lens, np.ones_like(inputs.kv_lens), cost)


def _split(
    members: Indices, lengths: NDArray[np.int32], weights: NDArray[np.int32], cost: int
) -> Iterator[Indices]:
    """Cut `members` by length wherever that saves more than `cost` of padding, by weight."""
    order = members[np.argsort(-lengths[members], kind="stable")]
    sorted_lengths = lengths[order].astype(np.int64)
    behind = np.cumsum(weights[order][::-1], dtype=np.int64)[::-1]
    saved = (sorted_lengths[0] - sorted_lengths) * behind  # by a cut before each
    cut = int(saved.argmax())
    if saved[cut] <= cost:
        yield members
        return
    yield from _split(np.sort(order[:cut]), lengths, weights, cost)
    yield from _split(np.sort(order[cut:]), lengths, weights, cost)


def _packed_rows(
    starts: Indices, query_lens: NDArray[np.int64], num_tokens: int
) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
    """The rows of the packed query that a group reads, and those that it writes if these are not the same."""
    offsets = np.arange(query_lens.max())
    rows = (starts[:, None] + np.minimum(offsets, query_lens[:, None] - 1)).ravel()
    padding = (offsets >= query_lens[:, None]).ravel()
    if padding.any():
        return torch.from_numpy(rows), torch.from_numpy(np.where(padding, num_tokens, rows))
    if rows[-1] - rows[0] == len(rows) - 1:  # ascending by construction
        return slice(int(rows[0]), int(rows[-1]) + 1), None
    return torch.from_numpy(rows), None
