"""Trees of drafts: their shape, the best choice among them, and what they accept."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.drafters.draft_tree import (
    DraftTree,
    accepted_lengths,
    default_tree,
    tree_from_accuracy,
    tree_from_ranks,
)
from tests.support.examples import share_of


@pytest.mark.parametrize(
    ("parents", "ranks", "reason"),
    [
        ((), (), "a tree of 0 parents"),
        ((-1, 0), (0,), "2 parents and 1 ranks"),
        ((0,), (0,), "before its parent"),
        ((-1, 2, -1), (0, 0, 1), "before its parent"),
        ((-2,), (0,), "before its parent"),
        ((-1, -1), (0, 0), "same rank"),
        ((-1, 0, 0), (0, 1, 1), "same rank"),
        ((-1,), (-1,), "a rank of -1"),
    ],
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], ranks: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftTree(parents, ranks)


def test_paths_depths_and_cuts() -> None:
    tree = DraftTree.of_paths([(0,), (1,), (0, 0), (1, 3), (0, 0, 2)])
    assert tree == DraftTree((-1, -1, 0, 1, 2), (0, 1, 0, 3, 2))
    assert tree.depths == (0, 0, 1, 1, 2)
    assert tree.width == 4
    assert tree.cut(3).paths == ((0,), (1,), (0, 0))
    assert DraftTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    with pytest.raises(ValueError, match="without its parent"):
        DraftTree.of_paths([(0,), (1, 0)])


@st.composite
def accuracies(draw: st.DrawFn) -> list[list[float]]:
    """Up to three heads of three ranks, whose chances need not fall with the rank."""
    share = st.integers(0, 33)
    return [
        [draw(share) / 100 for _ in range(3)] for _ in range(draw(st.integers(1, 3)))
    ]  # the ranks of a head exclude each other: at most 0.99 together


@settings(deadline=None, max_examples=share_of(60))
@given(accuracy=accuracies(), max_nodes=st.integers(1, 8))
def test_every_prefix_of_a_chosen_tree_is_a_tree_with_distinct_siblings(
    accuracy: list[list[float]], max_nodes: int
) -> None:
    tree = tree_from_accuracy(accuracy, max_nodes)
    assert len(tree.parents) <= max_nodes
    for count in range(1, len(tree.parents) + 1):
        assert tree.cut(count).paths == tree.paths[:count]  # building it checks the rest


def worth(accuracy: list[list[float]], path: tuple[int, ...]) -> float:
    return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_choice_is_the_best_of_all_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    accuracy = (rng.dirichlet(np.ones(3), size=2)[:, :2] * rng.uniform(0.4, 1.0, (2, 1))).tolist()
    paths = [(a,) for a in range(2)] + [(a, b) for a in range(2) for b in range(2)]
    for size in range(1, 6):
        trees = [
            chosen
            for chosen in combinations(paths, size)
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
        ]
        best = max(sum(worth(accuracy, path) for path in chosen) for chosen in trees)
        tree = tree_from_accuracy(accuracy, size)
        assert sum(worth(accuracy, path) for path in tree.paths) == pytest.approx(best)


def test_nodes_come_in_decreasing_order_of_worth() -> None:
    accuracy = [[0.5, 0.2, 0.1], [0.6, 0.3, 0.05]]
    values = [worth(accuracy, path) for path in tree_from_accuracy(accuracy, 9).paths]
    assert values == sorted(values, reverse=True)


def test_measured_ranks_choose_what_was_right_together() -> None:
    # Head 1 is right only where head 0 is: half of the time both are, half of the time neither.
    ranks = np.array([[0, 0], [5, 5], [0, 0], [1, 5]])
    tree = tree_from_ranks(ranks, width=4, max_nodes=8)
    assert tree.paths == ((0,), (0, 0), (1,))  # what never happened is left out
    assert accepted_lengths(tree, ranks).tolist() == [2, 0, 2, 1]
    assert accepted_lengths(tree.cut(1), ranks).tolist() == [1, 0, 1, 0]


def test_measured_choice_is_the_best_on_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.geometric(0.4, size=(200, 3)) - 1
    nodes = 6
    chosen = accepted_lengths(tree_from_ranks(ranks, 4, nodes), ranks).sum()
    for seed in range(50):
        accuracy = np.sort(np.random.default_rng(seed).dirichlet(np.ones(4), size=3))[:, ::-1]
        other = tree_from_accuracy(accuracy.tolist(), nodes)
        assert accepted_lengths(other, ranks).sum() <= chosen


def test_nothing_measured_still_gives_a_tree() -> None:
    assert tree_from_ranks(np.full((3, 2), 9), width=4, max_nodes=4).paths == ((0,),)


@pytest.mark.parametrize("num_heads", [1, 3, 4])
def test_the_default_tree_uses_every_head_and_wants_the_likeliest_first(num_heads: int) -> None:
    tree = default_tree(num_heads)
    assert len(tree.parents) <= 32
    assert max(tree.depths) == num_heads - 1
    assert tree.paths[0] == (0,)
