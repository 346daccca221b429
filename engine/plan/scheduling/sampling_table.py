"""SamplingTable: the sampling parameters of every running request, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.plan.grammar import MaskOf
from engine.plan.request import Request, SamplingParams
from engine.plan.scheduling.token_history import TokenHistory
from engine.plan.step_records import Int64, LogitAdjustment, SamplingInputs, TokenCounts

_COLUMNS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "num_logprobs": np.int32,
}


class SamplingTable:
    """A row for each row of block tables, so that a step's parameters are one gather a column."""

    def __init__(self, num_rows: int) -> None:
        self._columns = {name: np.zeros(num_rows, kind) for name, kind in _COLUMNS.items()}
        self._may_adjust = np.zeros(num_rows, np.bool_)
        self._scores_prompt = np.zeros(num_rows, np.bool_)
        self._histories: list[TokenHistory | None] = [None] * num_rows

    def write(self, row: int, request: Request) -> None:
        """Write the request's parameters into its row, over those of an earlier request."""
        sampling, columns = request.sampling, self._columns
        for name in ("temperature", "top_k", "top_p", "min_p"):
            columns[name][row] = getattr(sampling, name)
        columns["seed"][row] = as_int64(sampling.seed)
        columns["num_logprobs"][row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._may_adjust[row] = bool(
            sampling.logit_bias
            or sampling.allowed_token_ids is not None
            or request.draws_by_history
            or request.num_output_tokens < sampling.min_tokens
        )
        self._scores_prompt[row] = request.scores_prompt
        self._histories[row] = history_of(sampling, request.num_prompt_tokens)

    def scoring(self, rows: Int64) -> list[int]:
        """Which of these rows may want log-probabilities of prompt tokens, as indices into `rows`."""
        found: list[int] = np.flatnonzero(self._scores_prompt[rows]).tolist()
        return found

    def may_adjust(self, rows: Int64) -> bool:
        """Whether any of these rows may need more than its columns."""
        return bool(self._may_adjust[rows].any())

    def columns(self, rows: Int64, positions: Int64) -> SamplingInputs:
        """The columns of these rows, in this order; `adjusted` adds what else they draw by."""
        columns = {name: column[rows] for name, column in self._columns.items()}
        return SamplingInputs(position=positions, adjustments=(), **columns)

    def adjusted(
        self,
        columns: SamplingInputs,
        rows: Int64,
        requests: Sequence[Request],
        paths: Sequence[tuple[int, ...]] | None = None,
    ) -> SamplingInputs:
        """The `columns` of these rows with what their requests need beyond; a finished one needs nothing.

        `paths` are the drafts before each row; None if there are none.
        """
        adjustments = []
        for index in np.flatnonzero(self._may_adjust[rows]).tolist():
            request, path = requests[index], paths[index] if paths else ()
            if request.is_finished:
                continue
            before = Before(request.token_ids, request.num_prompt_tokens, self._histories[rows[index]], path)
            mask = None if request.grammar is None else MaskOf(request.grammar, path)
            adjustments.append(adjustment_of(index, request.sampling, request.stop_token_ids, before, mask))
        return replace(columns, adjustments=tuple(each for each in adjustments if each is not None))


def as_int64(seed: int) -> int:
    """The int64 with the seed's low 64 bits."""
    return ((seed + 2**63) & (2**64 - 1)) - 2**63


def history_of(sampling: SamplingParams, num_prompt_tokens: int) -> TokenHistory | None:
    """A new history for a sequence of these parameters; None if nobody would ask for it."""
    return TokenHistory(num_prompt_tokens) if sampling.has_penalties else None


class Before(NamedTuple):
    """What stands before the token that a row draws: a sequence's known tokens, then `path`, drafts."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    history: TokenHistory | None = None  # has counted some of the known ones; None if no penalty is set
    path: tuple[int, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens that are no prompt, drafts included."""
        return len(self.token_ids) + len(self.path) - self.num_prompt_tokens

    def ends_with(self, word: Sequence[int]) -> bool:
        """True if the output ends with `word`; the prompt does not count."""
        if len(word) > self.num_output_tokens:
            return False
        num_known = max(0, len(word) - len(self.path))
        known = self.token_ids[len(self.token_ids) - num_known :]
        return (*known, *self.path[len(self.path) + num_known - len(word) :]) == tuple(word)

    def counts(self) -> TokenCounts | None:
        """All of it, counted; None if no penalty is set."""
        if self.history is None:
            return None
        self.history.follow(self.token_ids)
        return self.history.counts(self.path)


def adjustment_of(
    row: int,
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    before: Before,
    allowed_mask: MaskOf | None = None,
) -> LogitAdjustment | None:
    """What the row behind `before` needs beyond the columns; None if nothing, as past min_tokens."""
    banned: tuple[int, ...] = ()
    if before.num_output_tokens < sampling.min_tokens:
        banned = tuple(sorted(stop_token_ids))
    banned += tuple(word[-1] for word in sampling.bad_words if before.ends_with(word[:-1]))
    is_limited = sampling.allowed_token_ids is not None or allowed_mask is not None
    if not (banned or sampling.logit_bias or is_limited or sampling.has_penalties):
        return None
    return LogitAdjustment(
        row=row,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        allowed_mask=allowed_mask,
        banned_token_ids=banned,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        history=before.counts(),
    )
