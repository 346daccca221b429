"""EagleDrafter: trees of drafts from one layer over the target's features, with K/V of its own.

The layer is an EAGLE-3 layer that was trained for the target, or the MTP module that the target came with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from engine.compute.drafters.eagle_kv import EagleKv, Slab
from engine.compute.drafters.eagle_round import GUESSES, Chain, EagleCompute, EagleNoise, EagleRound
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.medusa import as_tensor
from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.runner.device import in_stream, own_stream
from engine.compute.sampling.noise import row_keys
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, TargetFeatures
from engine.plan.step_records import SamplingInputs

# A guess that is less likely to come than this is not worth a row of the target's pass. What the layer
# says of itself is too low.
LEAST_CHANCE = 0.03
# Rows that one round reads, but for those of a single sequence: after a pause all sequences have a window of
# them. A GPU's plan of its memory has room for what so many are computed in.
MOST_ROWS = 4096


@dataclass(slots=True)
class _Known:
    """What is known of a sequence; `is_broken` once a job left tokens out: nothing is drafted for it then.

    The rows of its features up to the position `read_to` were read.
    """

    token_ids: list[int] = field(default_factory=list)
    is_broken: bool = False
    read_to: int = 0

    def hear(self, job: DraftJob) -> None:
        """Take the job's tokens in place of what was there from its first position on."""
        self.is_broken |= job.first > len(self.token_ids)
        self.token_ids[job.first :] = job.token_ids


class _Turn(NamedTuple):
    """A job whose rows are read in this call, and where they go."""

    job: DraftJob
    runs: Sequence[TargetFeatures]  # the newest window of them
    num_rows: int
    num_ahead: int  # drafts that the chain must begin with: they are being verified
    num_drafts: int  # with these
    is_tree: bool
    slab: Slab


class EagleDrafter:
    """One call reads every job's new features, and then guesses up to `num_wanted` tokens for it.

    They are a chain of the likeliest tokens and, beside these, what else might come in their places: the best
    of all by their chance (as the dynamic trees of EAGLE-2 and 3; but only the chain is continued).
    Only verified positions stay in the K/V: what a draft wrote there is written over by the next call. While
    a chain is verified, a job for what may follow it has the chain drawn again, from the newest row on: it is
    gone on with as long as the layer, which may have read more since, still says the same.

    A request that samples gets the tokens that the position's own noise favours, as the target will, where
    the drafter `couples`; see MedusaDrafter. A sequence whose older features are missing, since it was
    preempted or its prompt was cached, is drafted for from those there are.

    On a GPU all of a call is in a stream of its own, beside the pass that verifies. It reads features that
    the host has waited for, and is waited for itself.
    """

    is_cheap = False
    is_stepwise = False
    reads_features = True

    def __init__(
        self,
        compute: EagleCompute,
        kv: EagleKv,
        weights: EagleWeights | MtpModule,
        feature_layers: tuple[int, ...],
        *,
        couples: bool = True,
        plants_trees: bool = True,
    ) -> None:
        """`weights` are what it computes with, `feature_layers` the target's layers that it reads.

        Unless it `plants_trees`, a draft is its likeliest chain.
        """
        self.method = "mtp" if isinstance(weights, MtpModule) else "heads"
        self.feature_layers = feature_layers
        self.kv = kv
        self.weights = weights
        self.compute = compute  # over the same K/V another may be put here, before the first draft
        self._couples = couples
        self._plants_trees = plants_trees
        self._known: dict[str, _Known] = {}
        self._stream = own_stream(kv.keys.device)

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """A chain for each job with features of its newest token; whatever the layer raises comes through."""
        begin = perf_counter()
        with in_stream(self._stream):
            drawn: dict[str, Draft] = {}
            for turns in _in_rounds(self._turns(jobs)):
                drawn |= self._drawn(turns)
        if self._stream is not None:
            self._stream.synchronize()  # features may be freed from now on
        drafts = tuple(drawn.get(job.request.request_id) or _answer(job, (), None) for job in jobs)
        return DraftResult(drafts, perf_counter() - begin)

    def _drawn(self, turns: Sequence[_Turn]) -> dict[str, Draft]:
        """What each of the turns drafts, by request."""
        try:
            found = self.compute.run(self._round(turns))
        except Exception:
            self.close([turn.job.request.request_id for turn in turns])  # it is unknown what was written
            raise
        drawn: dict[str, Draft] = {}
        for turn, chain in zip(turns, found, strict=True):
            turn.slab.num_kept += turn.num_rows
            draft = plant(turn.job, self._beyond(turn, chain), as_tree=turn.is_tree)
            if draft.parents is None:  # a chain is taken to be known here, unlike a tree
                self._known[draft.request_id].token_ids += draft.token_ids
            drawn[draft.request_id] = draft
        return drawn

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        for request_id in request_ids:
            self._known.pop(request_id, None)
            self.kv.drop(request_id)

    def _turns(self, jobs: Sequence[DraftJob]) -> list[_Turn]:
        """Who reads something in this call, those with most drafts first."""
        current = {job.request.request_id for job in jobs}
        turns = []
        for job in jobs:
            known = self._known.setdefault(job.request.request_id, _Known())
            known.hear(job)
            if job.features and not known.is_broken and (turn := self._turn(job, current)) is not None:
                turns.append(turn)
        return sorted(turns, key=lambda turn: -turn.num_drafts)

    def _turn(self, job: DraftJob, current: Collection[str]) -> _Turn | None:
        request_id, newest = job.request.request_id, job.features[-1].position
        known = self._known[request_id]
        is_again = newest == known.read_to
        runs = newest_rows(job.features, 1 if is_again else self.kv.window)
        num_rows = sum(len(run.hidden) for run in runs)
        slab = self.kv.slab(request_id, num_rows, current)
        if slab is None:
            return None
        if is_again:
            slab.num_kept -= min(num_rows, slab.num_kept)
        known.read_to = newest
        num_ahead = job.next_position - job.num_committed
        follows = newest == job.num_committed - 1
        num_drafts = min(num_ahead + job.num_wanted, self.kv.most_drafts) if follows else 0
        is_tree = self._plants_trees and job.may_branch and not num_ahead
        return _Turn(job, runs, num_rows, num_ahead, num_drafts, is_tree, slab)

    def _beyond(self, turn: _Turn, chain: Chain) -> Chain:
        """What follows the drafts that are being verified; nothing where the chain is another."""
        known = self._known[turn.job.request.request_id].token_ids
        drafts = known[turn.job.num_committed : turn.job.next_position]
        again = [guesses[0].token_id for guesses in chain[: turn.num_ahead]]
        return chain[turn.num_ahead :] if again == drafts else []

    def _round(self, turns: Sequence[_Turn]) -> EagleRound:
        hidden = [as_tensor(run.hidden) for turn in turns for run in turn.runs]
        token_ids: list[int] = []
        positions: list[int] = []
        for turn in turns:
            known = self._known[turn.job.request.request_id].token_ids
            for run in turn.runs:
                token_ids += known[run.first + 1 : run.position + 1]
                positions += range(run.first, run.position)
        num_drafts = [turn.num_drafts for turn in turns]
        # Beside a chain nothing else takes a place.
        num_wanted = [turn.num_drafts * (1 if turn.is_tree else GUESSES) for turn in turns]
        draws = self._couples and any(turn.job.request.sampling.temperature for turn in turns)
        return EagleRound(
            features=hidden[0] if len(hidden) == 1 else torch.cat(hidden),
            token_ids=token_ids,
            positions=positions,
            num_rows=[turn.num_rows for turn in turns],
            num_kept=[turn.slab.num_kept for turn in turns],
            slabs=[turn.slab.index for turn in turns],
            num_drafts=num_drafts,
            num_wanted=num_wanted,
            least_chance=min(turn.job.least_chance for turn in turns),
            noise=self._noise(turns, max(num_drafts)) if draws else None,
        )

    def _noise(self, turns: Sequence[_Turn], most: int) -> EagleNoise:
        first = np.array([turn.job.num_committed for turn in turns], np.int64)
        sampling = self._sampling(turns)
        positions = (first[:, None] + np.arange(most)).reshape(-1)
        keys = row_keys(np.repeat(sampling.seed, most), positions)
        return EagleNoise(sampling, keys.view(len(turns), most, 2))

    def _sampling(self, turns: Sequence[_Turn]) -> SamplingInputs:
        """A row for each turn."""
        params = [turn.job.request.sampling for turn in turns]
        num_rows = len(params)
        return SamplingInputs(
            temperature=np.array([each.temperature for each in params], np.float32),
            top_k=np.array([each.top_k for each in params], np.int32),
            top_p=np.array([each.top_p for each in params], np.float32),
            min_p=np.array([each.min_p for each in params], np.float32),
            seed=np.array([each.seed % 2**64 for each in params], np.uint64).view(np.int64),
            position=np.array([turn.job.num_committed for turn in turns], np.int64),
            num_logprobs=np.full(num_rows, -1, np.int32),
        )


def _in_rounds(turns: Sequence[_Turn]) -> Iterator[Sequence[_Turn]]:
    """The turns in their order, as many at a time as have MOST_ROWS together, one at least."""
    first = num_rows = 0
    for place, turn in enumerate(turns):
        if place > first and num_rows + turn.num_rows > MOST_ROWS:
            yield turns[first:place]
            first, num_rows = place, 0
        num_rows += turn.num_rows
    if turns:
        yield turns[first:]


def newest_rows(runs: Sequence[TargetFeatures], limit: int) -> list[TargetFeatures]:
    """The last of the runs, of up to `limit` rows together, oldest first."""
    kept: list[TargetFeatures] = []
    for run in reversed(runs):
        rows = as_tensor(run.hidden)[-limit:]
        kept.append(TargetFeatures(run.position, rows))
        limit -= len(rows)
        if not limit:
            break
    return kept[::-1]


def plant(job: DraftJob, chain: Chain, *, as_tree: bool = True) -> Draft:
    """The tree of the best guesses, best first, without what would follow a token that ends the request.

    Unless `as_tree`, only what is likeliest at each place.
    """
    guesses: list[tuple[float, int, int, int]] = []  # by falling chance; of equals those before others
    for depth, own in enumerate(chain):
        guesses += [
            (-guess.chance, depth, rank, guess.token_id)
            for rank, guess in enumerate(own if as_tree else own[:1])
            if guess.chance >= LEAST_CHANCE or not (depth or rank)
        ]
        if own[0].token_id in job.request.stop_token_ids:
            break
    guesses.sort()
    token_ids: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    above = [-1]  # the place of what each depth follows
    for negative, depth, rank, token_id in guesses[: job.num_wanted]:
        if rank == 0:
            above.append(len(token_ids))
        token_ids.append(token_id)
        parents.append(above[depth])
        before = chain[depth - 1][0].chance if depth else 1.0
        chances.append(min(1.0, -negative / before) if before > 0 else 0.0)
    planted = tuple(parents) if as_tree else None
    return replace(_answer(job, tuple(token_ids), planted), chances=tuple(chances))


def _answer(job: DraftJob, token_ids: tuple[int, ...], parents: tuple[int, ...] | None) -> Draft:
    return Draft(job.request.request_id, job.epoch, job.next_position, token_ids, parents or None)
