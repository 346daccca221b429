"""DraftSequence: what a draft model knows of one sequence, and how the token after it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.plan.scheduling.sampling_table import Before, adjustment_of, as_int64
from engine.plan.scheduling.token_history import TokenHistory
from engine.plan.speculation.drafter import DraftRequest
from engine.plan.step_records import LogitAdjustment, SamplingInputs


@dataclass(slots=True)
class DraftSequence:
    """Known tokens: committed ones, drafts of others and its own.

    `is_broken` once its row failed, it held a token that the model cannot read, or a job left tokens out:
    nothing is drafted for it then. `history` has counted some of the tokens; None if no penalty is set.
    """

    request: DraftRequest
    token_ids: list[int]
    history: TokenHistory | None
    is_broken: bool = False


def has_ended(request: DraftRequest, token_ids: Sequence[int]) -> bool:
    """True if the newest token ends the request, so that nothing can follow it."""
    return ends_with(request, len(token_ids), token_ids[-1])


def ends_with(request: DraftRequest, num_tokens: int, token_id: int) -> bool:
    """True if this token, when it makes the sequence so long, ends the request."""
    num_output = num_tokens - request.num_prompt_tokens
    return num_output > max(0, request.sampling.min_tokens) and token_id in request.stop_token_ids


def up_to_the_end(known: DraftSequence, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Of the drafts that follow what is known, those up to the first that ends the request."""
    num_known = len(known.token_ids)
    for count, token_id in enumerate(token_ids, start=1):
        if ends_with(known.request, num_known + count, token_id):
            return tuple(token_ids[:count])
    return tuple(token_ids)


def depends_on_newest_only(known: DraftSequence) -> bool:
    """Whether the tokens after this sequence can be drawn knowing of each only that it follows the last."""
    is_free = not known.request.sampling.bad_words
    return is_free and adjustment_after(known, 0) is None


def adjustment_after(known: DraftSequence, row: int) -> LogitAdjustment | None:
    """What the row that draws the token after this sequence needs beyond its columns."""
    request = known.request
    before = Before(known.token_ids, request.num_prompt_tokens, known.history)
    return adjustment_of(row, request.sampling, request.stop_token_ids, before)


def sampling_inputs(sequences: Sequence[DraftSequence]) -> SamplingInputs:
    """The parameters of the rows that draw the token after each of these sequences."""
    params = [known.request.sampling for known in sequences]
    adjustments = (adjustment_after(known, row) for row, known in enumerate(sequences))
    return SamplingInputs(
        temperature=np.array([sampling.temperature for sampling in params], np.float32),
        top_k=np.array([sampling.top_k for sampling in params], np.int32),
        top_p=np.array([sampling.top_p for sampling in params], np.float32),
        min_p=np.array([sampling.min_p for sampling in params], np.float32),
        seed=np.array([as_int64(sampling.seed) for sampling in params], np.int64),
        position=np.array([len(known.token_ids) for known in sequences], np.int64),
        num_logprobs=np.full(len(params), -1, np.int32),
        adjustments=tuple(adjustment for adjustment in adjustments if adjustment is not None),
    )
