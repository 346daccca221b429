"""MedusaDrafter: trees of drafts from heads on the target's last hidden state. Keeps nothing of a request."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.medusa_heads import (
    CONFIG_FILE,
    MODEL_TYPE,
    WEIGHTS_FILE,
    MedusaHeads,
    load_medusa_heads,
)
from engine.compute.drafters.medusa_published import check_published, is_published, load_published_medusa
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.model_files import read_json
from engine.compute.sampling.noise import gumbel
from engine.compute.sampling.row_groups import in_groups
from engine.errors import StartRefused
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, TargetFeatures
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import Int64


class MedusaDrafter:
    """Answers every job with a tree for the positions after the one its features drew.

    A job without features, or with features of a token it does not know, gets an empty answer. The tree
    follows the features even if more tokens are known by now: it is for the asker to see which of it still
    holds. A request that samples gets the candidates that the position's own noise favours, as the target
    will (coupled draws: Daliri, Musco, Suresh, 2024), where it `couples`. Only `match` allows that: the other
    rules draw plainly, by that same noise, where a step leaves a draft out, and a draft may be left out for
    what it is.
    """

    method = "medusa"
    is_cheap = False
    is_stepwise = True
    reads_features = True

    def __init__(self, heads: MedusaHeads, tree: DraftTree | None = None, *, couples: bool = True) -> None:
        """`tree` None is the one that came with the heads. Raises ValueError for one they cannot fill."""
        self._heads = heads
        self._couples = couples
        self._tree = heads.tree if tree is None else tree
        if max(self._tree.depths) >= heads.num_heads or self._tree.width > len(heads.token_ids):
            raise ValueError(f"a tree of depth {max(self._tree.depths) + 1} for {heads.num_heads} heads")
        self._num_depths = max(self._tree.depths) + 1
        self._nodes = tuple(zip(self._tree.parents, self._tree.ranks, self._tree.depths, strict=True))

    @property
    def num_nodes(self) -> int:
        """How many drafts its tree has."""
        return len(self._nodes)

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """A tree for each job, of up to `num_wanted` nodes; one batched pass of the heads for all."""
        started = time.perf_counter()
        ready = [(job, features) for job in jobs if (features := usable_features(job)) is not None]
        found: dict[str, Draft] = {}
        if ready:
            candidates = self._candidates([job for job, _ in ready], [features for _, features in ready])
            for (job, features), rows in zip(ready, candidates.tolist(), strict=True):
                found[job.request.request_id] = self._plant(job, features, rows)
        drafts = tuple(found.get(job.request.request_id) or _nothing(job) for job in jobs)
        return DraftResult(drafts, time.perf_counter() - started)

    def close(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""

    def _candidates(self, jobs: Sequence[DraftJob], features: Sequence[TargetFeatures]) -> torch.Tensor:
        """The tokens that each head puts first, best first: [jobs, depths, width]."""
        token_ids = self._heads.token_ids
        hidden = torch.stack([as_tensor(each.hidden)[-1] for each in features])  # [jobs, hidden]
        scores = self._heads(hidden.to(token_ids.device))[:, : self._num_depths]
        groups = in_groups(len(jobs), self._num_depths * len(token_ids))
        best = [self._best(scores[group].float(), jobs[group], features[group]) for group in groups]
        return token_ids[torch.cat(best)]

    def _best(
        self, scores: torch.Tensor, jobs: Sequence[DraftJob], features: Sequence[TargetFeatures]
    ) -> torch.Tensor:
        """Which of the `scores` [jobs, depths, n] are best, where a job samples by its noise, too."""
        sampling = [job.request.sampling for job in jobs]
        temperature = np.array([each.temperature for each in sampling])
        sampled = np.flatnonzero((temperature > 0) & self._couples)
        if len(sampled):
            rows = torch.from_numpy(sampled).to(scores.device)
            seed = np.array([each.seed % 2**64 for each in sampling], dtype=np.uint64).view(np.int64)
            first = np.array([each.position + 1 for each in features], dtype=np.int64)
            scores[rows] = couple(
                scores[rows], self._heads.token_ids, temperature[sampled], seed[sampled], first[sampled]
            )
        return scores.topk(self._tree.width, dim=-1).indices

    def _plant(self, job: DraftJob, features: TargetFeatures, candidates: list[list[int]]) -> Draft:
        """The tree with its tokens, without what would follow a stop token."""
        tokens: list[int] = []
        parents: list[int] = []
        places: list[int | None] = []  # where each node of the tree went, None for those left out
        for parent, rank, depth in self._nodes:
            above = places[parent] if parent >= 0 else -1
            if above is None or (above >= 0 and tokens[above] in job.request.stop_token_ids):
                places.append(None)
                continue
            if len(tokens) == job.num_wanted:
                break
            places.append(len(tokens))
            tokens.append(candidates[depth][rank])
            parents.append(above)
        is_chain = all(parent == place - 1 for place, parent in enumerate(parents))
        return Draft(
            job.request.request_id,
            job.epoch,
            features.position + 1,
            tuple(tokens),
            None if is_chain else tuple(parents),
        )


def load_medusa(directory: Path, target: LoadedModel, verification: Verification = "match") -> MedusaDrafter:
    """The drafter around the heads in `directory`, trained here or published by others, with their tree.

    Raises StartRefused.
    """
    load = load_published_medusa if is_published(directory) else load_medusa_heads
    return MedusaDrafter(load(directory, target), couples=verification == "match")


def check_medusa(directory: Path) -> None:
    """Raise StartRefused unless there are Medusa heads; whether they fit the model shows in loading them."""
    if is_published(directory):
        check_published(directory)
        return
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not os.path.isfile(directory / name):
            raise StartRefused(f"--medusa-heads {directory}: there is no {name} in it.")
    if (kind := read_json(directory / CONFIG_FILE).get("model_type")) != MODEL_TYPE:
        raise StartRefused(f"{directory / CONFIG_FILE}: model_type is {kind!r}, expected {MODEL_TYPE!r}.")


def usable_features(job: DraftJob) -> TargetFeatures | None:
    """The features to draft from; None if there are none, none are wanted, or they run ahead of the job."""
    if job.num_wanted < 1 or not job.features:
        return None
    features = job.features[-1]
    return features if features.position < job.next_position else None


def couple(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: NDArray[np.float64],
    seed: Int64,
    first_position: Int64,
) -> torch.Tensor:
    """`logits` [rows, depths, n] of rows that sample, as scores whose maximum is the coupled draw.

    Depth d of row r draws at `first_position[r]` + d, under the noise with which the target draws there; the
    other arrays have an entry a row too.
    """
    num_rows, num_depths, _ = logits.shape
    positions = (first_position[:, None] + np.arange(num_depths)).reshape(-1)
    noise = gumbel(np.repeat(seed, num_depths), positions, token_ids)  # [rows * depths, n]
    scale = logits.new_tensor(temperature)[:, None, None]
    return logits / scale + noise.view(num_rows, num_depths, -1).to(logits.dtype)


def as_tensor(hidden: object) -> torch.Tensor:
    """What the plan tier carries as an object. Raises TypeError."""
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"a hidden state of type {type(hidden).__name__}")
    return hidden


def _nothing(job: DraftJob) -> Draft:
    return Draft(job.request.request_id, job.epoch, job.next_position, ())
