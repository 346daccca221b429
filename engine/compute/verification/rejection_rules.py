"""The rules `rejection` and `block` over a batch of sequences: each finds the last accepted draft.

This module applies the formulas of `acceptance_probability` to ragged batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.verification.acceptance_probability import (
    accept_chance,
    block_chance,
    block_weights,
    residual,
)
from engine.compute.verification.draft_rows import ROOT, DraftRows
from engine.plan.step_records import Int64


class DraftProbabilities:
    """What the drafts of a step were drawn from, `probs` as in DraftInputs, as float64 on `device`."""

    def __init__(self, probs: Sequence[object], vocab_size: int, device: torch.device) -> None:
        self._probs = probs
        self._vocab_size = vocab_size
        self._device = device

    def of_tokens(self, index: Int64, token_ids: Int64) -> torch.Tensor:
        """The probability with which each draft was drawn as what it is. [n]"""
        values = torch.ones(len(index), dtype=torch.float64, device=self._device)
        sampled, rows = self._sampled(index)
        if len(rows):
            chosen = [row[token] for row, token in zip(rows, token_ids[sampled].tolist(), strict=True)]
            values[_to(self._device, sampled)] = torch.stack(chosen).to(self._device, torch.float64)
        return values

    def rows(self, index: Int64, token_ids: Int64) -> torch.Tensor:
        """The distribution each draft was drawn from. [n, vocab]"""
        probs = torch.zeros((len(index), self._vocab_size), dtype=torch.float64, device=self._device)
        probs.scatter_(1, _to(self._device, token_ids).unsqueeze(1), 1.0)
        sampled, rows = self._sampled(index)
        if len(rows):
            probs[_to(self._device, sampled)] = torch.stack(rows).to(self._device, torch.float64)
        return probs.clamp_(min=0.0)  # a negative entry would make tokens possible that the target excludes

    def _sampled(self, index: Int64) -> tuple[NDArray[np.intp], list[torch.Tensor]]:
        """Which of these drafts were not certain, and their distributions."""
        found: list[tuple[int, torch.Tensor]] = []
        for place, draft in enumerate(index.tolist() if self._probs else ()):
            row = self._probs[draft]
            if isinstance(row, torch.Tensor):
                found.append((place, row))
        return np.array([place for place, _ in found], np.intp), [row for _, row in found]


@dataclass(slots=True)
class Round:
    """One round for n sequences, whose rows of logits are the only ones here.

    `probs` are the target's, zeros in a row that is not `sound`; a rule overwrites them. `uniform` holds a
    fresh number for each draft.
    """

    drafts: DraftRows
    draft_probs: DraftProbabilities
    probs: torch.Tensor  # [rows, vocab] float64
    sound: NDArray[np.bool_]  # [rows]
    uniform: torch.Tensor  # [n, G] float64

    def token_probs(self, rows: Int64, token_ids: Int64) -> torch.Tensor:
        """The target's probability of a token in each of some rows."""
        return self.probs[_to(self.probs.device, rows), _to(self.probs.device, token_ids)]


# Returns the last accepted draft of each sequence [n], ROOT if none. The row of `probs` that follows it then
# holds the distribution of the token that the round commits after its drafts.
Rule = Callable[[Round], Int64]


def token_rule(this: Round) -> Int64:
    """Each draft by itself, siblings in order until one is accepted; chains and trees.

    A refused draft leaves its residual as the distribution of the next sibling, or of the recovered token.
    """
    drafts, device = this.drafts, this.probs.device
    last = np.full(len(drafts.first_row), ROOT)
    for draft in range(drafts.token_ids.shape[1]):  # parents come first, so one pass finds the whole path
        rows = drafts.first_row + last + 1
        tried = np.flatnonzero((drafts.parents[:, draft] == last) & this.sound[rows])
        if not len(tried):
            continue
        rows, token_ids, index = rows[tried], drafts.token_ids[tried, draft], drafts.index[tried, draft]
        chance = accept_chance(
            this.token_probs(rows, token_ids), this.draft_probs.of_tokens(index, token_ids)
        )
        accepted = (this.uniform[_to(device, tried), draft] < chance).cpu().numpy()
        last[tried[accepted]] = draft
        if not accepted.all():
            refused = _to(device, rows[~accepted])
            q = this.draft_probs.rows(index[~accepted], token_ids[~accepted])
            this.probs[refused] = residual(this.probs[refused], q)
    return last


def block_rule(this: Round) -> Int64:
    """All drafts of a chain together: the longest prefix that one of their numbers accepts; chains only.

    The decision on a prefix reads the numbers of longer prefixes, so every round needs fresh numbers, and
    drafts drawn with fresh ones.
    """
    drafts, device = this.drafts, this.probs.device
    width = drafts.token_ids.shape[1]
    column = np.arange(width)
    rows = drafts.first_row[:, None] + column  # [n, G] the row that draft i answers to
    # A chain ends before the first row that has failed.
    usable = (column < drafts.num_drafts[:, None]) & this.sound[np.minimum(rows, len(this.sound) - 1)]
    usable = np.logical_and.accumulate(usable, axis=1)
    at = np.nonzero(usable)
    token_ids, index = drafts.token_ids[at], drafts.index[at]
    p, q = torch.zeros((2, *usable.shape), dtype=torch.float64, device=device)  # [n, G] each
    where = _to(device, at[0]), _to(device, at[1])
    p[where] = this.token_probs(rows[at], token_ids)
    q[where] = this.draft_probs.of_tokens(index, token_ids)
    weights = block_weights(p, q)  # [n, G + 1]
    chances = weights[:, 1:].clone()  # [n, G] of the prefix that ends with draft i
    rows_q = this.draft_probs.rows(index, token_ids)  # [drafts, vocab]
    inner = at[1] > 0
    sequence, draft = _to(device, at[0][inner]), _to(device, at[1][inner])
    chances[sequence, draft - 1] = block_chance(
        weights[sequence, draft], this.probs[_to(device, rows[at][inner])], rows_q[_to(device, inner)]
    )
    accepted = (this.uniform < chances).cpu().numpy() & usable
    last: Int64 = np.where(accepted, column, ROOT).max(axis=1)
    cut = at[1] == last[at[0]] + 1  # the first draft after the accepted ones, where there is one
    sequence, draft = _to(device, at[0][cut]), _to(device, at[1][cut])
    after = _to(device, rows[at][cut])
    this.probs[after] = residual(this.probs[after], rows_q[_to(device, cut)], weights[sequence, draft])
    return last


def _to(device: torch.device, array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
