"""DraftTree: which candidates of which head a tree of drafts holds, and how to choose the best such tree.

Every node is worth the chance that verification reaches it and accepts it. That never grows along a branch,
so the n most valuable nodes are a tree for every n (the greedy construction of Cai et al., "Medusa", 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]
Path = tuple[int, ...]  # the rank taken at each depth from the known tokens on


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in decreasing order of worth: the first n are a tree for every n.

    Node i follows node `parents[i]`, below i, or the known tokens for -1. A node at depth d, 0 for those that
    follow the known tokens, is the candidate of rank `ranks[i]`, 0 being the likeliest, of head d. Siblings
    differ in rank. Raises ValueError for anything else, and for a tree without nodes.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.ranks):
            raise ValueError(f"a tree of {len(self.parents)} parents and {len(self.ranks)} ranks")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a node that comes before its parent")
        if min(self.ranks) < 0:
            raise ValueError(f"a rank of {min(self.ranks)}")
        if len(set(zip(self.parents, self.ranks, strict=True))) < len(self.parents):
            raise ValueError("two siblings of the same rank")

    @classmethod
    def of_paths(cls, paths: Sequence[Path]) -> Self:
        """The tree whose nodes are reached by these paths, in this order. Raises ValueError for a gap."""
        index = {path: node for node, path in enumerate(paths)}
        if any(path[:-1] and path[:-1] not in index for path in paths):
            raise ValueError("a node without its parent")
        parents = tuple(index[path[:-1]] if path[:-1] else -1 for path in paths)
        return cls(parents, tuple(path[-1] for path in paths))

    @classmethod
    def chain(cls, length: int) -> Self:
        """Every head's likeliest candidate, one after another."""
        return cls.of_paths([(0,) * depth for depth in range(1, length + 1)])

    @property
    def paths(self) -> tuple[Path, ...]:
        """The ranks from the known tokens to each node."""
        found: list[Path] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            found.append(((*found[parent], rank)) if parent >= 0 else (rank,))
        return tuple(found)

    @property
    def depths(self) -> tuple[int, ...]:
        """Each node's head."""
        return tuple(len(path) - 1 for path in self.paths)

    @property
    def width(self) -> int:
        """How many candidates of a head it looks at."""
        return max(self.ranks) + 1

    def cut(self, num_nodes: int) -> DraftTree:
        """Its first nodes, at least one."""
        return DraftTree(self.parents[:num_nodes], self.ranks[:num_nodes])


def grow_tree(
    worth: Callable[[Path], float], num_heads: int, width: int, max_nodes: int, least: float = 0.0
) -> DraftTree:
    """The tree of up to `max_nodes` nodes with the greatest total worth, most valuable first.

    `worth` must not grow along a path; among equals the shallower, then the lower-ranked node comes first.
    Nodes worth no more than `least` are left out, though never the very best.
    """
    waiting: list[tuple[float, int, Path]] = [(-worth((rank,)), 1, (rank,)) for rank in range(width)]
    heapq.heapify(waiting)
    chosen: list[Path] = []
    while waiting and len(chosen) < max_nodes:
        negative, depth, path = heapq.heappop(waiting)
        if chosen and -negative <= least:
            break
        chosen.append(path)
        if depth < num_heads:
            for rank in range(width):
                child = (*path, rank)
                heapq.heappush(waiting, (-worth(child), depth + 1, child))
    return DraftTree.of_paths(chosen)


def tree_from_accuracy(accuracy: Sequence[Sequence[float]], max_nodes: int) -> DraftTree:
    """The best tree if heads erred independently: `accuracy[k][r]` is how often head k's rank r is right."""

    def worth(path: Path) -> float:
        return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))

    return grow_tree(worth, len(accuracy), min(len(ranks) for ranks in accuracy), max_nodes)


def tree_from_ranks(ranks: Ranks, width: int, max_nodes: int) -> DraftTree:
    """The best tree for what was seen: `ranks[i, k]` is the right token's rank in head k at position i.

    Unlike the product of accuracies this knows that heads are right together, in easy places. Paths that were
    never taken are left out.
    """
    counts: dict[Path, int] = {}
    for row in ranks.tolist():
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= width:
                break
            path = tuple(row[:depth])
            counts[path] = counts.get(path, 0) + 1
    num_rows = max(1, len(ranks))
    return grow_tree(lambda path: counts.get(path, 0) / num_rows, ranks.shape[1], width, max_nodes)


def accepted_lengths(tree: DraftTree, ranks: Ranks) -> NDArray[np.int64]:
    """How many drafts of `tree` would be accepted at each position, [positions]; `ranks` as above."""
    accepted = np.zeros(len(ranks), dtype=np.int64)
    for path in tree.paths:
        hit = (ranks[:, : len(path)] == path).all(axis=1)
        np.maximum(accepted, len(path) * hit, out=accepted)
    return accepted


def default_tree(num_heads: int, max_nodes: int = 32) -> DraftTree:
    """A tree for heads of which nothing is known: each is taken to be right as a typical weak head is."""
    typical = [[0.35 * 0.8**head * 0.35**rank for rank in range(8)] for head in range(num_heads)]
    return tree_from_accuracy(typical, max_nodes)
