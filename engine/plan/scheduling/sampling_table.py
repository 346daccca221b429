"""SamplingTable: the sampling parameters of every running request, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.plan.request import Request, SamplingParams
from engine.plan.step_records import Int64, LogitAdjustment, SamplingInputs
from engine.plan.structured_output import TokenMask


class SamplingTable:
    """A row for each row of block tables, so that a step's parameters are one gather a column."""

    def __init__(self, num_rows: int) -> None:
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, -1, np.int32)
        self._may_adjust = np.zeros(num_rows, np.bool_)
        self._scores_prompt = np.zeros(num_rows, np.bool_)

    def write(self, row: int, request: Request) -> None:
        """Write the request's parameters into its row, over whatever an earlier one left there."""
        sampling = request.sampling
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = as_int64(sampling.seed)
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._may_adjust[row] = bool(
            sampling.logit_bias
            or sampling.allowed_token_ids is not None
            or sampling.has_penalties
            or sampling.bad_words
            or request.grammar is not None
            or request.num_output_tokens < sampling.min_tokens
        )
        self._scores_prompt[row] = request.scores_prompt

    def scoring(self, rows: Int64) -> list[int]:
        """Which of these rows may want log-probabilities of prompt tokens, as indices into `rows`."""
        found: list[int] = np.flatnonzero(self._scores_prompt[rows]).tolist()
        return found

    def gather(
        self,
        rows: Int64,
        requests: Sequence[Request],
        positions: Int64,
        paths: Sequence[tuple[int, ...]] | None = None,
    ) -> SamplingInputs:
        """The columns for these rows in this order, to which the other arguments belong one by one.

        `paths` are the drafts that a row takes for given beside its request's tokens; None is none anywhere.
        """
        flagged = np.flatnonzero(self._may_adjust[rows]).tolist()
        adjustments = [
            _adjustment(index, requests[index], paths[index] if paths else ()) for index in flagged
        ]
        return SamplingInputs(
            temperature=self._temperature[rows],  # [R]
            top_k=self._top_k[rows],  # [R]
            top_p=self._top_p[rows],  # [R]
            min_p=self._min_p[rows],  # [R]
            seed=self._seed[rows],  # [R]
            position=positions,  # [R]
            num_logprobs=self._num_logprobs[rows],  # [R]
            adjustments=tuple(adjustment for adjustment in adjustments if adjustment is not None),
        )


def as_int64(seed: int) -> int:
    """The int64 with the seed's low 64 bits."""
    return ((seed + 2**63) & (2**64 - 1)) - 2**63


def _adjustment(index: int, request: Request, path: tuple[int, ...]) -> LogitAdjustment | None:
    token_ids = [*request.token_ids, *path] if path else request.token_ids
    mask = None if request.grammar is None else request.grammar.mask(path)
    return adjustment_of(
        index, request.sampling, request.stop_token_ids, token_ids, request.num_prompt_tokens, mask
    )


def adjustment_of(
    row: int,
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    allowed_mask: TokenMask | None = None,
) -> LogitAdjustment | None:
    """What the row that draws the token after `token_ids`, prompt and output, needs beyond the columns.

    None if nothing, which includes a row for which only min_tokens was set, once it is reached.
    """
    banned: tuple[int, ...] = ()
    if len(token_ids) - num_prompt_tokens < sampling.min_tokens:
        banned = tuple(sorted(stop_token_ids))
    if sampling.bad_words:
        banned += _ends_of_bad_words(sampling.bad_words, token_ids, num_prompt_tokens)
    has_penalties = sampling.has_penalties
    is_limited = sampling.allowed_token_ids is not None or allowed_mask is not None
    if not (banned or sampling.logit_bias or is_limited or has_penalties):
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
        prompt_token_ids=tuple(token_ids[:num_prompt_tokens]) if has_penalties else (),
        output_token_ids=tuple(token_ids[num_prompt_tokens:]) if has_penalties else (),
    )


def _ends_of_bad_words(
    bad_words: Sequence[tuple[int, ...]], token_ids: Sequence[int], num_prompt_tokens: int
) -> tuple[int, ...]:
    """The last tokens of those bad words whose other tokens end the output; the prompt does not count."""
    num_output = len(token_ids) - num_prompt_tokens
    ends = []
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= num_output and tuple(token_ids[len(token_ids) - num_before :]) == word[:-1]:
            ends.append(word[-1])
    return tuple(ends)
