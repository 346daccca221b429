"""How one step's sequences are put together so that a layer needs only a few large operations.

Pure layout: computed once a step from lengths and block tables, the same for all layers of one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.kv_tensors import KvTensors
from engine.outputs import StepInputs

Indices = NDArray[np.intp]

# Measured on two cores: one more group costs a layer about as much as reading this many bytes of padding.
_GROUP_COST_BYTES = 1 << 20
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
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    def index(self, kv: KvTensors, num_kv_heads: int) -> torch.Tensor:
        """What `KvTensors.gather` takes for a layer of `num_kv_heads`; made once a step."""
        index = self._indices.get(num_kv_heads)
        if index is None:
            index = self._indices[num_kv_heads] = kv.head_index(self.blocks, num_kv_heads)
        return index


class QueryGroup:
    """Sequences of equal query length and similar context, attended together."""

    def __init__(self, inputs: StepInputs, kv: KvTensors, members: Indices, starts: Indices) -> None:
        self.num_sequences = len(members)
        self.query_len = int(inputs.query_lens[members[0]])
        self.rows = _packed_rows(starts[members], self.query_len)
        self._kv_lens = inputs.kv_lens[members].astype(np.int64)
        self._tables = inputs.block_tables[members]
        self._kv = kv
        self._tiles: dict[int | None, list[Tile]] = {}

    def tiles(self, window: int | None) -> list[Tile]:
        """The tiles, in order, for layers with `window`; made once a step."""
        found = self._tiles.get(window)
        if found is None:
            size = _TILE_TOKENS if self._kv_lens.max() <= _LONG_CONTEXT else _LONG_CONTEXT_TILE_TOKENS
            firsts = range(0, self.query_len, size)
            found = [self._tile(slice(first, min(first + size, self.query_len)), window) for first in firsts]
            self._tiles[window] = found
        return found

    def _tile(self, queries: slice, window: int | None) -> Tile:
        block_size = self._kv.block_size
        positions = (self._kv_lens - self.query_len)[:, None] + np.arange(queries.start, queries.stop)
        first_seen = np.zeros_like(self._kv_lens)
        if window is not None:
            first_seen = np.maximum(positions[:, 0] - window + 1, 0)
        first_block = first_seen // block_size
        last_block = positions[:, -1] // block_size
        columns = first_block[:, None] + np.arange((last_block - first_block).max() + 1)  # [n, max_blocks]
        # Padding repeats a block of the sequence's own: another's may hold NaN, which no mask can contain.
        blocks = np.take_along_axis(self._tables, np.minimum(columns, last_block[:, None]), axis=1)
        num_keys = blocks.shape[1] * block_size
        fused = self.query_len == 1 and self.num_sequences * num_keys <= _FUSED_KEYS
        mask = self._mask(positions - (first_block * block_size)[:, None], num_keys, window, fused)
        return Tile(queries, torch.tensor(blocks, dtype=torch.long), mask, fused)

    def _mask(
        self, queries: NDArray[np.int64], num_keys: int, window: int | None, whole: bool
    ) -> torch.Tensor | None:
        """The additive mask of queries at places `queries` [n, tile] among `num_keys` gathered ones.

        Leaves out the first places if every query sees them, unless `whole`; None if nothing is hidden.
        """
        first = int(queries.min()) + 1
        if window is not None and queries.max() - window >= 0:
            first = 0
        if first >= num_keys:
            return None
        keys = np.arange(0 if whole else first, num_keys)
        hidden = keys > queries[..., None]  # [n, tile, width]
        if window is not None:
            hidden |= keys <= queries[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=self._kv.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None, :, None]


def group_sequences(inputs: StepInputs, kv: KvTensors) -> list[QueryGroup]:
    """Every sequence in exactly one group; padding is bounded by what a group of its own would cost."""
    starts = np.cumsum(inputs.query_lens, dtype=np.intp) - inputs.query_lens
    layer = kv.layers[0]
    token_bytes = layer.num_kv_heads * (layer.key_dim + layer.value_dim) * kv.dtype.itemsize
    groups = []
    for query_len in np.unique(inputs.query_lens):
        members = np.flatnonzero(inputs.query_lens == query_len)
        for similar in _split(members, inputs.kv_lens, _GROUP_COST_BYTES // token_bytes):
            longest = int(inputs.kv_lens[similar].max())
            size = min(_MAX_GROUP_TOKENS // int(query_len), _MAX_GROUP_BYTES // (token_bytes * longest))
            size = max(1, size)
            for first in range(0, len(similar), size):
                groups.append(QueryGroup(inputs, kv, similar[first : first + size], starts))
    return groups


def _split(members: Indices, kv_lens: NDArray[np.int32], cost: int) -> Iterator[Indices]:
    """Cut `members` by context length wherever that saves more than `cost` padded tokens."""
    order = members[np.argsort(-kv_lens[members], kind="stable")]
    lengths = kv_lens[order].astype(np.int64)
    saved = (lengths[0] - lengths) * np.arange(len(order), 0, -1)  # by a cut before each
    cut = int(saved.argmax())
    if saved[cut] <= cost:
        yield members
        return
    yield from _split(np.sort(order[:cut]), kv_lens, cost)
    yield from _split(np.sort(order[cut:]), kv_lens, cost)


def _packed_rows(starts: Indices, query_len: int) -> slice | torch.Tensor:
    """The rows of the packed query that sequences at `starts` own; a slice when they lie in one run."""
    rows = (starts[:, None] + np.arange(query_len)).ravel()
    if rows[-1] - rows[0] == len(rows) - 1:  # ascending by construction
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
