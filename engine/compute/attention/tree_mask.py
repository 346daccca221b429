"""TreeMask: which tokens the drafts of one tree attend to, and where the accepted drafts must be moved.

A tree lies in consecutive slots after its sequence's newest token, parents before children. Its *places*
count from that token, which is place 0; a place's depth is its distance from it in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.compute.attention.layer_kv import Reach
from engine.plan.step_records import DraftInputs, Int32, Int64, StepInputs

UNSEEN = np.iinfo(np.int32).max


class TreeMask:
    """A sequence's newest token and the drafts that branch off behind it (Miao et al. 2023, SpecInfer)."""

    def __init__(self, parents: Int32) -> None:
        seen = np.eye(len(parents) + 1, dtype=np.bool_)
        for place, parent in enumerate(parents.tolist(), start=1):
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
            depths = np.where(keys < 0, keys, self._depths[places])
            seen &= newest + depths >= reach.first(newest + self._depths[queries, None])
        return seen

    def gaps(self) -> Int32:
        """Depth of each place minus that of each place it attends to, UNSEEN for others: [places, places]."""
        gaps = self._depths[:, None] - self._depths
        return np.where(self._seen, gaps, UNSEEN).astype(np.int32)


def tree_masks(inputs: StepInputs) -> dict[int, TreeMask]:
    """The masks of a step by sequence. Chains are left out: plain causal attention serves them."""
    drafts = inputs.drafts
    if drafts is None or drafts.parents is None:
        return {}
    shapes: dict[bytes, TreeMask] = {}  # a drafter's trees are mostly of one shape
    trees = {}
    for index, parents, _ in _branching(drafts, drafts.parents):
        sequence = int(drafts.sequence[index])
        assert inputs.query_lens[sequence] == len(parents) + 1
        shape = parents.tobytes()
        if shape not in shapes:
            shapes[shape] = TreeMask(parents)
        trees[sequence] = shapes[shape]
    return trees


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
            path = _path(parents.tolist(), proposed.tolist(), token_ids[first_row : first_row + len(parents)])
            first_draft = int(inputs.logits_rows[first_row]) + 1
            for depth, draft in enumerate(path):
                if draft != depth:
                    sources.append(first_draft + draft)
                    targets.append(first_draft + depth)
    return inputs.slot_mapping[sources], inputs.slot_mapping[targets]


def _branching(drafts: DraftInputs, parents: Int32) -> list[tuple[int, Int32, Int64]]:
    """(index, parents, tokens) of the sequences whose drafts are no chain."""
    stops = np.cumsum(drafts.num_drafts, dtype=np.intp)
    starts = stops - drafts.num_drafts
    in_sequence = np.arange(len(parents)) - np.repeat(starts, drafts.num_drafts)
    branches = np.logical_or.reduceat(parents != in_sequence - 1, starts)
    return [
        (index, parents[starts[index] : stops[index]], drafts.token_ids[starts[index] : stops[index]])
        for index in np.flatnonzero(branches).tolist()
    ]


def _path(parents: list[int], proposed: list[int], token_ids: Sequence[int]) -> list[int]:
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
