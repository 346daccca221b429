"""SingleRows: tokens that attend each by itself, where a kernel takes them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.attention.backend import LayerCall
from engine.model.attention.draft_tree import draft_trees
from engine.outputs import StepInputs

# Longer queries share enough keys for matrix products over all of them to be faster.
_MAX_QUERY = 16


@dataclass(frozen=True, slots=True)
class SingleRows:
    """`rows` of the packed step, the sequence of each, and how many of its positions each sees, int64 [n].

    `tables` is int32 [sequences, max_blocks], `longest` the largest of `lengths`.
    """

    rows: torch.Tensor
    sequences: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    longest: int


class RowAttention(Protocol):
    """Attends from single tokens; each result depends on its own token and positions alone."""

    def attend(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: SingleRows,
        output: torch.Tensor,
        call: LayerCall,
    ) -> None:
        """Fill `output` at `rows` with what these rows of `query` attend to; both [tokens, heads, dim].

        `pages` are the layer's keys and values, [blocks, kv_heads, block_size, dim].
        """
        ...


def split_single(inputs: StepInputs) -> tuple[SingleRows | None, NDArray[np.intp]]:
    """The tokens of sequences with few of them, None if there is none; and the other sequences.

    Drafts that form trees do not see all that lies before them: their sequences are among the others.
    """
    is_single = inputs.query_lens <= _MAX_QUERY
    is_single[list(draft_trees(inputs))] = False
    members = np.flatnonzero(is_single)
    others = np.flatnonzero(~is_single)
    if not len(members):
        return None, others
    query_lens = inputs.query_lens.astype(np.int64)
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    rows = np.flatnonzero(is_single[owners])
    sequences = owners[rows]
    behind = np.cumsum(query_lens)[sequences] - 1 - rows  # tokens of the sequence after this one
    lengths = inputs.kv_lens.astype(np.int64)[sequences] - behind
    tables = np.ascontiguousarray(inputs.block_tables, dtype=np.int32)
    return SingleRows(
        torch.from_numpy(rows),
        torch.from_numpy(sequences),
        torch.from_numpy(lengths),
        torch.from_numpy(tables),
        int(lengths.max()),
    ), others
