"""SamplingTable: the sampling parameters of every running request, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.plan.request import Request, SamplingParams
from engine.plan.step_records import Int64, LogitAdjustment, SamplingInputs
from engine.plan.structured_output import TokenMask

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
        """The columns for these rows in this order; the other arguments have an entry for each of them.

        `paths` are the drafts between a request's tokens and a row; None where no request has any.
        """
        adjustments = []
        for index in np.flatnonzero(self._may_adjust[rows]).tolist():
            request, path = requests[index], paths[index] if paths else ()
            token_ids = [*request.token_ids, *path] if path else request.token_ids
            mask = None if request.grammar is None else request.grammar.mask(path)
            stop, num_prompt = request.stop_token_ids, request.num_prompt_tokens
            adjustments.append(adjustment_of(index, request.sampling, stop, token_ids, num_prompt, mask))
        return SamplingInputs(
            position=positions,
            adjustments=tuple(adjustment for adjustment in adjustments if adjustment is not None),
            **{name: column[rows] for name, column in self._columns.items()},
        )


def as_int64(seed: int) -> int:
    """The int64 with the seed's low 64 bits."""
    return ((seed + 2**63) & (2**64 - 1)) - 2**63


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
