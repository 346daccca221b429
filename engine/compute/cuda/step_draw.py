"""StepDraw: queues the draw of a step behind its pass, whatever its rows ask for, and its log-probabilities.

Nothing here waits for the device. What is known on the host alone, as bad data, is kept beside the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.cuda.device_draw import (
    DrawColumns,
    FilteredDraw,
    column_words,
    filtered_rows,
)
from engine.compute.cuda.device_ints import Array, send
from engine.compute.cuda.graphs.device_pass import DevicePass, TokenMemory
from engine.compute.cuda.graphs.launched import NOTHING_LEFT_HERE, DrawnTokens, ScoredRows
from engine.compute.sampling.adjustments import adjust, lay_out
from engine.compute.sampling.logprobs import RowScores, score
from engine.compute.sampling.row_groups import in_groups
from engine.compute.sampling.sampler import select_rows
from engine.plan.step_records import NO_TOKEN, Int64, LogitAdjustment, SamplingInputs


def can_draw(sampling: SamplingInputs) -> bool:
    """Whether all that these rows ask for is done here.

    A top-k that no request can ask for is not, but fails as the Sampler has it fail.
    """
    return not (sampling.top_k < -1).any()


class StepDraw:
    """Draws into a TokenMemory what `Sampler.sample` would draw, row r at its place in the pass."""

    def __init__(self, memory: TokenMemory, draw_filtered: FilteredDraw) -> None:
        self._memory = memory
        self._filtered_draw = draw_filtered

    def queue(self, under_way: DevicePass, sampling: SamplingInputs) -> DrawnTokens:
        """Queue the draw of every row, and the copies of what comes of it.

        The columns of the rows that are drawn from as they are went to the device with the pass.
        """
        logits, places, tokens = under_way.logits, under_way.places, self._memory.tokens
        if len(places):
            under_way.draw()
        adjusted = {adjustment.row: adjustment for adjustment in sampling.adjustments}
        self._draw_filtered(logits, sampling, places, tokens, adjusted)
        errors: dict[int, str] = {}
        changed = np.array(list(adjusted), np.intp)
        for group in in_groups(len(changed), logits.shape[1]):
            errors |= self._draw_adjusted(under_way, sampling, changed[group], adjusted)
        scores = tuple(self._score(under_way, sampling))
        count = int(places[-1]) + 1 if len(places) else 0
        return DrawnTokens(to_host(tokens[:count]), places, errors, scores)

    def _draw_filtered(
        self,
        logits: torch.Tensor,
        sampling: SamplingInputs,
        places: Int64,
        tokens: torch.Tensor,
        left_out: Collection[int] = (),
    ) -> None:
        """Draw the rows that top-k or top-p filters from `logits` at their places, to those of `tokens`."""
        filtered = filtered_rows(sampling, logits.shape[1], left_out)
        if filtered is None:
            return
        words: dict[str, Array] = {**filtered.words, "places": places[filtered.rows]}
        sent = send(words, logits.device)
        at = sent["places"]
        drawn = self._filtered_draw(logits, at, filtered.filters(sent), sent["keys"])
        tokens.index_copy_(0, at, drawn)

    def _draw_adjusted(
        self,
        under_way: DevicePass,
        sampling: SamplingInputs,
        rows: NDArray[np.intp],
        adjustments: Mapping[int, LogitAdjustment],
    ) -> dict[int, str]:
        """Draw some rows anew, from logits that are changed first; what is wrong with the data of which row.

        What was drawn from the logits as they are says whether those are finite.
        """
        memory, count = self._memory, len(rows)
        own = select_rows(replace(sampling, adjustments=()), rows)
        layout = lay_out([adjustments[row] for row in rows.tolist()], under_way.logits.shape[1])
        numbers = np.arange(count)
        words: dict[str, Array] = {**layout.arrays, **column_words(own, numbers, count)}
        sent = send({**words, "places": under_way.places[rows]}, under_way.logits.device)
        logits = under_way.logits.index_select(0, sent["places"]).float()  # [count, vocab], a copy
        adjust(logits, sent)
        drawn = memory.plain_draw(logits, DrawColumns.of(sent))
        self._draw_filtered(logits, own, numbers, drawn)
        drawn.masked_fill_(logits.amax(dim=1) == -torch.inf, NOTHING_LEFT_HERE)  # NaN is not
        is_sound = memory.tokens.index_select(0, sent["places"]) >= 0
        memory.tokens.index_copy_(0, sent["places"], torch.where(is_sound, drawn, NO_TOKEN))
        return {int(rows[index]): reason for index, reason in layout.errors.items()}

    def _score(self, under_way: DevicePass, sampling: SamplingInputs) -> Iterator[ScoredRows]:
        """Queue what is told of the drawn tokens and of the likeliest, by the logits as they are."""
        asking = np.flatnonzero(sampling.num_logprobs >= 0)
        for group in in_groups(len(asking), under_way.logits.shape[1]):
            rows = asking[group]
            at = send({"places": under_way.places[rows]}, under_way.logits.device)["places"]
            logits = under_way.logits.index_select(0, at).float()  # [n, vocab]
            chosen = self._memory.tokens.index_select(0, at).clamp_(min=0)
            num_top = sampling.num_logprobs[rows].tolist()
            scores = score(logits, chosen, max(num_top), likeliest)
            yield ScoredRows(rows.tolist(), num_top, RowScores(*map(to_host, scores)))


def likeliest(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """The `num_top` likeliest tokens of each row of float32 [rows, vocab], of equal ones the lower id first.

    By one selection among whole numbers, no two of them equal: a float's order above, the id's below.
    """  # [rows, num_top]
    bits = (logits + 0.0).view(torch.int32)  # without a negative zero, which would be below the other
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as the floats are ordered
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (order.long() << 32) - token_ids  # [rows, vocab]
    return keys.topk(num_top, dim=1).indices


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there once the device is past it: on CUDA into pinned memory, without waiting."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
