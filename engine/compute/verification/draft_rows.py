"""DraftRows: the drafts of one step as padded arrays, and the walk that follows drawn tokens through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.plan.step_records import NO_TOKEN, DraftInputs, Int64

ROOT = -1  # as a parent: the newest known token
_PADDING = -2  # as a parent: there is no draft here


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The drafts of V sequences, at most G of one, and the rows of logits that they belong to.

    The logits of row `first_row[v]` follow the newest known token, those of `first_row[v] + i + 1` draft i.
    `index` counts the drafts of the whole step.
    """

    first_row: Int64  # [V]
    num_drafts: Int64  # [V]
    token_ids: Int64  # [V, G] NO_TOKEN where there is no draft
    parents: Int64  # [V, G] ROOT for the first ones
    index: Int64  # [V, G]
    are_chains: bool

    @classmethod
    def of(cls, drafts: DraftInputs) -> Self:
        """Spread the packed drafts of a step."""
        num_drafts = drafts.num_drafts.astype(np.int64)
        column = np.arange(num_drafts.max())
        real = column < num_drafts[:, None]  # [V, G]
        index = np.zeros(real.shape, np.int64)
        index[real] = np.arange(num_drafts.sum())
        chain = np.broadcast_to(column - 1, real.shape)
        parents = chain if drafts.parents is None else drafts.parents[index]
        return cls(
            first_row=drafts.first_row,
            num_drafts=num_drafts,
            token_ids=np.where(real, drafts.token_ids[index], NO_TOKEN),
            parents=np.where(real, parents, _PADDING),
            index=index,
            are_chains=drafts.parents is None or bool((parents == chain)[real].all()),
        )

    def select(self, sequences: NDArray[np.intp]) -> DraftRows:
        """Some of the sequences, their rows of logits following each other from 0 on."""
        num_drafts = self.num_drafts[sequences]
        return DraftRows(
            first_row=np.cumsum(num_drafts + 1) - (num_drafts + 1),
            num_drafts=num_drafts,
            token_ids=self.token_ids[sequences],
            parents=self.parents[sequences],
            index=self.index[sequences],
            are_chains=self.are_chains,
        )

    def rows(self, sequences: NDArray[np.intp]) -> Int64:
        """Their rows of logits, sequence by sequence."""
        counts = self.num_drafts[sequences] + 1
        starts = np.cumsum(counts) - counts
        rows: Int64 = np.arange(counts.sum()) + np.repeat(self.first_row[sequences] - starts, counts)
        return rows

    def follow(self, drawn: Int64) -> Int64:
        """How far `drawn`, one token a row of logits, agrees with the drafts: the last draft that does. [V]

        ROOT when none does. `drawn` is NO_TOKEN where a row has failed. The first of equal siblings counts.
        """
        if self.are_chains:
            before = self.first_row[:, None] + np.arange(self.token_ids.shape[1])  # [V, G]
            real = self.parents != _PADDING
            agrees = real & (drawn[np.where(real, before, 0)] == self.token_ids)
            ends: Int64 = np.logical_and.accumulate(agrees, axis=1).sum(axis=1) - 1
            return ends
        last = np.full(len(self.first_row), ROOT)
        for draft in range(self.token_ids.shape[1]):  # parents come first, so one pass finds the whole path
            agrees = self.token_ids[:, draft] == drawn[self.first_row + last + 1]
            last[(self.parents[:, draft] == last) & agrees] = draft
        return last

    def paths(self, last: Int64) -> NDArray[np.bool_]:
        """Marks the drafts on the way from the root to `last` [V], itself included. [V, G]"""
        if self.are_chains:
            chain: NDArray[np.bool_] = np.arange(self.token_ids.shape[1]) <= last[:, None]
            return chain
        marks = np.zeros(self.token_ids.shape, np.bool_)
        sequences = np.flatnonzero(last != ROOT)
        while len(sequences):
            marks[sequences, last[sequences]] = True
            last = np.where(last == ROOT, ROOT, self.parents[np.arange(len(last)), last])
            sequences = sequences[last[sequences] != ROOT]
        return marks
