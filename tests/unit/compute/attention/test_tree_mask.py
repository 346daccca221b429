"""The shape of a draft tree: who sees whom, and where the accepted drafts go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.compute.attention.layer_kv import Reach
from engine.compute.attention.paged_rows import PagedRows
from engine.compute.attention.tree_mask import (
    UNSEEN,
    TreeMask,
    accepted_moves,
    tree_masks,
)
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import NO_TOKEN, StepInputs

# Drafts 0 and 1 follow the newest token, 2 and 3 follow draft 1, 4 follows draft 3.
PARENTS = [-1, -1, 1, 1, 3]
CHAIN = [-1, 0, 1]


def make_step(*trees: Sequence[int]) -> StepInputs:
    """One sequence a tree, after six tokens each; drafts are 10, 11, ... and blocks of 4 lie in order."""
    parts = []
    for row, parents in enumerate(trees):
        tokens = [1] * 7 + list(range(10, 10 + len(parents)))
        parts.append(Part(tokens, 6, len(tokens), list(range(4 * row, 4 * row + 4)), parents))
    return pack_step(parts, 4)


def sees(tree: TreeMask, window: int | None) -> list[str]:
    """A row a place, keys from two before the newest token to one behind the drafts."""
    seen = tree.sees(np.arange(6), np.arange(-2, 7), Reach.of(window, None), 6)
    return ["".join("x" if entry else "." for entry in row) for row in seen]


def test_gaps_are_differences_of_depth() -> None:
    gaps = TreeMask(PARENTS).gaps
    expected = ["0.....", "10....", "1.0...", "2.10..", "2.1.0.", "3.2.10"]
    rows = ["".join("." if gap == UNSEEN else str(gap) for gap in row) for row in gaps.tolist()]
    assert rows == expected


def test_a_kernel_gets_lengths_tables_and_trees() -> None:
    rows = PagedRows.of(make_step(CHAIN, PARENTS, [], [-1, -1]))
    assert rows.counts.tolist() == [4, 6, 1, 3]
    assert rows.lengths.tolist() == [10, 12, 7, 9]
    assert rows.tables[:, 0].tolist() == [0, 4, 8, 12]
    assert rows.trees is not None and rows.trees.tolist() == [-1, 0, -1, 36]
    assert rows.gaps is not None and rows.gaps[36:].tolist() == [
        0,
        UNSEEN,
        UNSEEN,
        1,
        0,
        UNSEEN,
        1,
        UNSEEN,
        0,
    ]
    assert all(tensor.is_contiguous() for tensor in (rows.counts, rows.lengths, rows.tables, rows.gaps))
    assert PagedRows.of(make_step(CHAIN)).trees is None


def test_a_draft_sees_its_branch_only() -> None:
    assert sees(TreeMask(PARENTS), None) == [
        "xxx......",
        "xxxx.....",
        "xxx.x....",
        "xxx.xx...",
        "xxx.x.x..",
        "xxx.x.xx.",
    ]


def test_a_window_counts_the_branch() -> None:
    assert sees(TreeMask(PARENTS), 3) == [
        "xxx......",
        ".xxx.....",
        ".xx.x....",
        "..x.xx...",
        "..x.x.x..",
        "....x.xx.",
    ]


def test_a_tree_belongs_to_its_sequence_and_equal_ones_are_one() -> None:
    trees = tree_masks(make_step([], PARENTS, CHAIN, [-1, -1], PARENTS))
    assert sorted(trees) == [1, 3, 4]
    assert trees[1] is trees[4]


def test_without_branches_there_is_no_tree() -> None:
    inputs = make_step(CHAIN, [-1])
    assert inputs.drafts is not None
    assert tree_masks(inputs) == {}
    assert tree_masks(replace(inputs, drafts=replace(inputs.drafts, parents=None))) == {}
    assert tree_masks(make_step([], [])) == {}


def moves(inputs: StepInputs, token_ids: list[int]) -> list[tuple[int, int]]:
    sources, targets = accepted_moves(inputs, token_ids)
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([11, 13, 14, 3], [(8, 7), (10, 8), (11, 9)]),
        ([11, 12, 3], [(8, 7), (9, 8)]),
        ([11, 3], [(8, 7)]),
        ([10, 3], []),
        ([3], []),
        ([NO_TOKEN], []),
    ],
)
def test_the_accepted_branch_moves_up(committed: list[int], expected: list[tuple[int, int]]) -> None:
    rows = committed + [NO_TOKEN] * (6 - len(committed))
    assert moves(make_step(PARENTS), rows) == expected
    beside_others = make_step([], CHAIN, PARENTS)
    shifted = [(source + 32, target + 32) for source, target in expected]
    assert moves(beside_others, [5, 10, 11, 12, 5, *rows]) == shifted


def test_among_equal_siblings_the_one_that_goes_on_is_taken() -> None:
    inputs = make_step([-1, -1, 1])
    assert inputs.drafts is not None
    inputs = replace(inputs, drafts=replace(inputs.drafts, token_ids=np.array([8, 8, 9])))
    assert moves(inputs, [8, 9, 3, NO_TOKEN]) == [(8, 7), (9, 8)]
    assert moves(inputs, [8, 3, NO_TOKEN, NO_TOKEN]) == []


def test_chains_never_move() -> None:
    inputs = make_step(CHAIN, [])
    assert moves(inputs, [10, 11, 12, 3, 4]) == []
    assert inputs.drafts is not None
    assert moves(replace(inputs, drafts=replace(inputs.drafts, parents=None)), [10, 11, 12, 3, 4]) == []
    assert moves(make_step([]), [4]) == []
