"""TreeMask: which tokens the drafts of one tree attend to, and where the accepted drafts must be moved.

A tree lies in consecutive slots after its sequence's newest token, parents before children. Its *places*
count from that token, which is place 0; a place's depth is its distance from it in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.compute.attention.layer_kv import Reach
from engine.plan.step_records import DraftInputs, Int32, Int64, StepInputs

UNSEEN = np.iinfo(np.int32).max
_KEPT_SHAPES = 1024


class TreeMask:
    """A sequence's newest token and the drafts that branch off behind it (Miao et al. 2023, SpecInfer)."""

    def __init__(self, parents: Sequence[int]) -> None:
        seen = np.eye(len(parents) + 1, dtype=np.bool_)
        for place, parent in enumerate(parents, start=1):
            seen[place] |= seen[parent + 1]
        self._seen = seen  # [places, places]: itself and what it follows
        self._depths = seen.sum(axis=1) - 1  # [places]

    def sees(
        self, queries: NDArray[np.intp], keys: NDArray[np.intp], reach: Reach | None, newest: int
    ) -> NDArray[np.bool_]:
        """Whether the drafts at places `queries` attend to the tokens at places `keys`: [queries, keys].

        Keys below 0 are the tokens before the newest one, which is at position `newest`; places past the
        drafts are never seen. The `reach` counts by depth, as if the draft's own branch were the only one.
        """
        places = np.clip(keys, 0, len(self._depths) - 1)
        seen = self._seen[np.ix_(queries, places)] & (keys < len(self._depths))
        if reach is not None:
            seen &= newest + self.depths(keys) >= reach.first(newest + self._depths[queries, None])
        return seen

    def depths(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """How far tokens at `places` are from the newest one: below 0 before it, anything past the drafts."""
        return np.where(places < 0, places, self._depths[np.clip(places, 0, len(self._depths) - 1)])

    @cached_property
    def gaps(self) -> Int32:
        """Depth of each place minus that of each place it attends to, UNSEEN for others: [places, places]."""
        gaps = self._depths[:, None] - self._depths
        return np.where(self._seen, gaps, UNSEEN).astype(np.int32)


def tree_masks(inputs: StepInputs) -> dict[int, TreeMask]:
    """The masks of a step by sequence. Chains are left out: plain causal attention serves them."""
    drafts = inputs.drafts
    if drafts is None or drafts.parents is None:
        return {}
    trees = {}
    for index, parents, _ in _branching(drafts, drafts.parents):
        sequence = int(drafts.sequence[index])
        assert inputs.query_lens[sequence] == len(parents) + 1
        trees[sequence] = _mask_of(parents)
    return trees


@lru_cache(maxsize=_KEPT_SHAPES)
def _mask_of(parents: tuple[int, ...]) -> TreeMask:
    """A drafter's trees have few shapes, which come again and again."""
    return TreeMask(parents)


def accepted_moves(inputs: StepInputs, token_ids: Sequence[int]) -> tuple[Int64, Int64]:
    """Slots (sources, targets) to copy so that each tree's accepted drafts lie one after another.

    `token_ids` are the step's sampled rows [R]: a sequence's accepted drafts from its first row on, then
    anything. `KvTensors.move_rows` takes the result; it is empty when nothing lies out of place.
    """
    drafts = inputs.drafts
    sources: list[int] = []
    targets: list[int] = []
    if drafts is not None and drafts.parents is not None:
        for index, parents, proposed in _branching(drafts, drafts.parents):
            first_row = int(drafts.first_row[index])
            path = _path(parents, proposed, token_ids[first_row : first_row + len(parents)])
            first_draft = int(inputs.logits_rows[first_row]) + 1
            for depth, draft in enumerate(path):
                if draft != depth:
                    sources.append(first_draft + draft)
                    targets.append(first_draft + depth)
    return inputs.slot_mapping[sources], inputs.slot_mapping[targets]


def _branching(drafts: DraftInputs, parents: Int32) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(index, parents, tokens) of the sequences whose drafts are no chain."""
    every_parent, token_ids, stop = tuple(parents.tolist()), tuple(drafts.token_ids.tolist()), 0
    for index, count in enumerate(drafts.num_drafts.tolist()):
        start, stop = stop, stop + count
        own = every_parent[start:stop]
        if own != tuple(range(-1, count - 1)):
            yield index, own, token_ids[start:stop]


def _path(parents: Sequence[int], proposed: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The longest path from the newest token whose drafts equal the first of `token_ids`."""
    ends = {-1}  # more than one where siblings are equal
    for token in token_ids:
        longer = {
            draft for draft, parent in enumerate(parents) if parent in ends and proposed[draft] == token
        }
        if not longer:
            break
        ends = longer
    path: list[int] = []
    draft = min(ends)
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]
