"""How good Medusa heads are on samples they have not seen, and which tree of drafts is best for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.drafters.draft_tree import DraftTree, Ranks, accepted_lengths, tree_from_ranks
from engine.compute.drafters.medusa import couple
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.training.medusa_training import index_of_tokens
from engine.training.samples import Positions
from engine.training.training_plan import TrainingProgress

MAX_NODES = 32  # of a tree: as many as a step verifies of one request
TREE_WIDTH = 12  # candidates of a head that a tree may look at
SHOWN_TOPS = (1, 2, 3, 5, 10)
SHOWN_NODES = (1, 2, 4, 8, 16, 32)
_CHUNK_ROWS = 128

Accuracy = dict[str, list[list[float]]]
TokensPerStep = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found, by kind of request: "greedy", "sampled" (coupled), "sampled, uncoupled".

    `accuracy[kind][k][i]` is how often head k has the right token among its first SHOWN_TOPS[i].
    `tokens_per_step[kind]` is what a verification step commits on average, by number of drafts: "chain" has
    one a head, a number is so many nodes of `tree`. `coverage` is the share of tokens that heads can guess.
    The tree was chosen on every second sample and judged on the others.
    """

    tree: DraftTree
    num_tokens: int
    coverage: float
    accuracy: Accuracy
    tokens_per_step: TokensPerStep


@dataclass(frozen=True, slots=True)
class _Kind:
    """The rows of one kind of request, and the ranks that its right tokens have."""

    samples: list[int]
    ranks: Ranks  # [all rows, K]; only its samples' rows mean something


def evaluate_heads(heads: MedusaHeads, positions: Positions, progress: TrainingProgress) -> Evaluation:
    """Rank the right tokens of all samples and choose the tree; the heads are left as they are."""
    plain = rank_tokens(heads, positions, progress, coupled=False)
    coupled = rank_tokens(heads, positions, progress, coupled=True)
    greedy = [i for i, sample in enumerate(positions.samples) if sample.temperature == 0]
    sampled = [i for i, sample in enumerate(positions.samples) if sample.temperature > 0]
    kinds = {
        "greedy": _Kind(greedy, plain),
        "sampled": _Kind(sampled, coupled),
        "sampled, uncoupled": _Kind(sampled, plain),
    }
    kinds = {name: kind for name, kind in kinds.items() if len(kind.samples) > 1}
    width = min(TREE_WIDTH, len(heads.token_ids))
    seen = np.concatenate([coupled[_rows(positions, i)] for i in range(0, len(positions.samples), 2)])
    tree = tree_from_ranks(seen, width, MAX_NODES)
    inside = index_of_tokens(heads)[positions.token_ids] >= 0
    return Evaluation(
        tree=tree,
        num_tokens=len(positions),
        coverage=float(inside.float().mean()),
        accuracy={name: _accuracy(kind, positions) for name, kind in kinds.items()},
        tokens_per_step={
            name: _tokens_per_step(kind, positions, tree, heads.num_heads) for name, kind in kinds.items()
        },
    )


@torch.inference_mode()
def rank_tokens(
    heads: MedusaHeads, positions: Positions, progress: TrainingProgress, *, coupled: bool
) -> Ranks:
    """The rank of the right token in each head at each row, [rows, K]; 0 is the first choice.

    A token the heads cannot guess, and one behind the end, has rank n. `coupled` ranks as the drafter does
    for requests that sample.
    """
    index = index_of_tokens(heads)
    device, num_ids = heads.token_ids.device, len(heads.token_ids)
    columns = _Columns(positions)
    found = []
    for rows in torch.split(torch.arange(len(positions)), _CHUNK_ROWS):
        right = index[positions.later_tokens(rows, heads.num_heads)].to(device)  # [rows, K]
        scores = heads(positions.hidden[rows].to(device)).float()  # [rows, K, n]
        drawn = torch.from_numpy(np.flatnonzero(columns.temperature[rows.numpy()] > 0))
        if coupled and len(drawn):
            scores[drawn] = columns.couple(scores[drawn], heads.token_ids, rows[drawn].numpy())
        best = scores.gather(2, right.clamp(min=0)[..., None])  # [rows, K, 1]
        ranks = (scores > best).sum(-1).masked_fill(right < 0, num_ids)
        found.append(ranks.cpu().numpy())
        progress.update("evaluate", float(rows[-1] + 1), len(positions), "coupled" if coupled else "plain")
    return np.concatenate(found)


class _Columns:
    """The sampling parameters of every row."""

    def __init__(self, positions: Positions) -> None:
        lengths = [len(sample.token_ids) for sample in positions.samples]
        self.temperature = np.repeat([sample.temperature for sample in positions.samples], lengths)
        self._seed = np.repeat(np.array([sample.seed for sample in positions.samples], np.int64), lengths)
        starts = [sample.first_position for sample in positions.samples]
        self._position = np.concatenate(
            [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
        )

    def couple(self, logits: torch.Tensor, token_ids: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """The scores of these rows under their own noise."""
        return couple(logits, token_ids, self.temperature[rows], self._seed[rows], self._position[rows] + 1)


def _accuracy(kind: _Kind, positions: Positions) -> list[list[float]]:
    rows = np.concatenate([_rows(positions, i) for i in kind.samples])
    shown = []
    for head in range(kind.ranks.shape[1]):
        exists = rows + head + 1 < positions.ends.numpy()[rows]
        ranks = kind.ranks[rows[exists], head]
        shown.append([float((ranks < top).mean()) if len(ranks) else 0.0 for top in SHOWN_TOPS])
    return shown


def _tokens_per_step(kind: _Kind, positions: Positions, tree: DraftTree, num_heads: int) -> dict[str, float]:
    """On the samples that the tree was not chosen on."""
    trees = {"chain": DraftTree.chain(num_heads)}
    trees |= {str(count): tree.cut(count) for count in SHOWN_NODES if count <= len(tree.parents)}
    judged = [i for i in kind.samples if i % 2] or kind.samples
    return {
        name: walk([accepted_lengths(each, kind.ranks[_rows(positions, i)]) for i in judged])
        for name, each in trees.items()
    }


def walk(accepted: list[NDArray[np.int64]]) -> float:
    """Tokens a step when whole sequences are decoded so: `accepted[s][i]` drafts after token i hold."""
    num_tokens = num_steps = 0
    for lengths in accepted:
        place = 0
        while place < len(lengths) - 1:
            place += int(lengths[place]) + 1
            num_steps += 1
        num_tokens += max(0, len(lengths) - 1)
    return num_tokens / max(1, num_steps)


def _rows(positions: Positions, sample: int) -> NDArray[np.int64]:
    start = int(positions.starts[sample])
    return np.arange(start, start + len(positions.samples[sample].token_ids))
