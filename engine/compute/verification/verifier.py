"""Verifier: holds the drafts of a step against the target's logits and says what each sequence commits.

Whatever drafters do, and however late, the committed tokens are those that plain sampling would have drawn
(`match`), or have exactly their distribution (`rejection`, `block`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling import row_groups
from engine.compute.sampling.noise import Stream, row_keys, uniforms
from engine.compute.sampling.row_groups import in_groups
from engine.compute.sampling.sampler import Sampler, draw_tokens, select_rows
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.rejection_rules import (
    DraftProbabilities,
    Round,
    Rule,
    block_rule,
    token_rule,
)
from engine.compute.verification.verified import (
    Draws,
    Verified,
    commit_drafts,
    commit_rows,
    has_logprobs,
    without_logprobs,
)
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import NO_TOKEN, DraftInputs, Int64, SamplingInputs


class Verifier(Protocol):
    """Judges the drafts of a step; keeps nothing between calls. Called on the target thread."""

    def draw(self, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None) -> Verified:
        """What every row of `logits` [R, vocab] commits, as SampledRows orders it; `logits` is left as it is.

        `sampling` describes the R rows, those of drafts included: their positions count depth and their
        adjustments know the drafts before them. None for `drafts` is plain sampling. The log-probabilities
        are the target's own. Raises ValueError when the shapes do not fit.
        """
        ...


def make_verifier(verification: Verification, sampler: Sampler) -> Verifier:
    """The verifier of that name; `block` judges steps that hold trees as `rejection` does."""
    if verification == "match":
        return MatchVerifier(sampler)
    return RejectionVerifier(sampler, block_rule if verification == "block" else token_rule)


class MatchVerifier:
    """Draws every row with the noise of its own position, and accepts the drafts that are what was drawn.

    What is committed is therefore token for token what plain sampling commits, whatever the drafts and
    whenever they come (the coupling of Daliri, Musco, Suresh 2024 if the drafter uses the same noise).
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None) -> Verified:
        """See Verifier."""
        if drafts is None:
            return Verified(self._sampler.sample(logits, sampling))
        drawn = self._sampler.sample(logits, without_logprobs(sampling))
        if not drawn.row_errors and not has_logprobs(sampling):
            return commit_drafts(drafts, drawn)
        rows = DraftRows.of(drafts)
        draws = Draws.of(drawn)
        return commit_rows(logits, sampling, rows, draws, rows.follow(draws.token_ids))


class RejectionVerifier:
    """Accepts drafts by chance, such that committed tokens have the distribution of plain sampling.

    The tokens depend on how many drafts a round had, so the same seed may give another text. The chances come
    from the sampler's own probabilities. A round's random numbers are keyed by its first position, and each
    round begins after the last, so no number is used twice. Greedy sequences have one text only: they are
    matched.
    """

    def __init__(self, sampler: Sampler, rule: Rule) -> None:
        self._sampler = sampler
        self._rule = rule

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None) -> Verified:
        """See Verifier."""
        if drafts is None:
            return Verified(self._sampler.sample(logits, sampling))
        rows = DraftRows.of(drafts)
        ruled = np.flatnonzero(sampling.temperature[rows.first_row] > 0)
        draws = self._draw_others(logits, sampling, rows.rows(ruled))
        last = rows.follow(draws.token_ids)
        draft_probs = DraftProbabilities(drafts.probs, logits.shape[1], logits.device)
        for group in _groups(rows, ruled, logits.shape[1]):
            last[group] = self._judge(logits, sampling, rows, draft_probs, group, draws)
        return commit_rows(logits, sampling, rows, draws, last)

    def _draw_others(self, logits: torch.Tensor, sampling: SamplingInputs, ruled: Int64) -> Draws:
        """Plain draws for the rows that no rule decides, NO_TOKEN in the others."""
        others = np.setdiff1d(np.arange(len(logits)), ruled, assume_unique=True)
        if len(others) == len(logits):
            return Draws.of(self._sampler.sample(logits, without_logprobs(sampling)))
        token_ids = np.full(len(logits), NO_TOKEN, np.int64)
        errors: dict[int, str] = {}
        for group in in_groups(len(others), logits.shape[1]):
            rows = others[group]
            some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
            draws = Draws.of(self._sampler.sample(some, without_logprobs(select_rows(sampling, rows))))
            token_ids[rows] = draws.token_ids
            errors |= {int(rows[row]): reason for row, reason in draws.errors.items()}
        return Draws(token_ids, errors)

    def _judge(
        self,
        logits: torch.Tensor,
        sampling: SamplingInputs,
        drafts: DraftRows,
        draft_probs: DraftProbabilities,
        group: NDArray[np.intp],
        draws: Draws,
    ) -> Int64:
        """The last accepted draft of each sequence of the group; `draws` gets the token after it."""
        rows = drafts.rows(group)
        here = drafts.select(group)
        inputs = select_rows(sampling, rows)
        some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
        probs, errors = self._sampler.probs(some, inputs)
        draws.errors.update({int(rows[row]): reason for row, reason in errors.items()})
        sound = np.ones(len(rows), np.bool_)
        sound[list(errors)] = False

        seed, width = inputs.seed[here.first_row], here.token_ids.shape[1]
        uniform = self._accept_numbers(seed, inputs.position[here.first_row], width).to(logits.device)
        rule = self._rule if drafts.are_chains else token_rule
        last = rule(Round(here, draft_probs, probs, sound, uniform))

        ends = here.first_row + last + 1
        after = probs[torch.from_numpy(ends).to(logits.device)]  # [group, vocab]
        draws.token_ids[rows[ends]] = self._last_tokens(after, seed, inputs.position[ends])
        return last

    def _accept_numbers(self, seed: Int64, first: Int64, width: int) -> torch.Tensor:
        """Fresh uniform numbers for `width` drafts of each sequence, [n, width], on the CPU.

        `first` is the position of the first token that the round commits: no other round's.
        """
        return uniforms(row_keys(seed, first, Stream.ACCEPT), torch.arange(width))

    def _last_tokens(self, weights: torch.Tensor, seed: Int64, position: Int64) -> Int64:
        """Draw the recovered or bonus tokens that go to `position`; `weights` is [n, vocab]."""
        keys = row_keys(seed, position, Stream.RECOVER)
        uniform = uniforms(keys, torch.zeros((len(seed), 1), dtype=torch.int64)).squeeze(1)
        token_ids: Int64 = draw_tokens(weights, uniform.to(weights.device)).cpu().numpy()
        return token_ids


def _groups(drafts: DraftRows, sequences: NDArray[np.intp], vocab_size: int) -> Iterator[NDArray[np.intp]]:
    """Cut the sequences into groups that fit into memory, one at least in each."""
    if not len(sequences):
        return
    sizes = (drafts.num_drafts[sequences] + 1) * vocab_size
    group = (np.cumsum(sizes) - 1) // row_groups.GROUP_LOGITS
    yield from np.split(sequences, np.flatnonzero(np.diff(group)) + 1)
