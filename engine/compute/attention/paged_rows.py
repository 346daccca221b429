"""PagedRows: the tokens of a step and the pages that each sees, as a kernel takes them all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.compute.attention.backend import LayerCall
from engine.compute.attention.tree_mask import tree_masks
from engine.plan.step_records import StepInputs


@dataclass(frozen=True, slots=True)
class PagedRows:
    """`counts` tokens of each sequence in packed order, the newest of its `lengths`: int32 [sequences] each.

    `tables` is int32 [sequences, max_blocks]. Where drafts form trees, `gaps` holds each TreeMask's, int32,
    one behind the other, and `trees` where those of a sequence begin, -1 for none: int32 [sequences].
    """

    counts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    trees: torch.Tensor | None
    gaps: torch.Tensor | None

    @classmethod
    def of(cls, inputs: StepInputs) -> PagedRows:
        """All tokens of a step."""
        own = (inputs.query_lens, inputs.kv_lens, inputs.block_tables)
        counts, lengths, tables = map(torch.from_numpy, own)
        trees = tree_masks(inputs)
        if not trees:
            return cls(counts, lengths, tables, None, None)
        gaps = [tree.gaps.ravel() for tree in trees.values()]
        begins = np.full(len(counts), -1, dtype=np.int32)
        begins[list(trees)] = np.cumsum([0, *map(len, gaps)])[:-1]
        return cls(counts, lengths, tables, torch.from_numpy(begins), torch.from_numpy(np.concatenate(gaps)))


class RowAttention(Protocol):
    """Attends from every row; each result depends on its own token and positions alone."""

    def attend(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: PagedRows,
        call: LayerCall,
    ) -> torch.Tensor:
        """What each token of `query` [tokens, heads, dim] attends to, in the same shape.

        `pages` are the layer's keys and values, [blocks, kv_heads, block_size, dim].
        """
        ...
