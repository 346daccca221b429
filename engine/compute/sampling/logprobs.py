"""Log-probabilities as the model gave them, before any processor, for the rows that ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from engine.compute.sampling.processors import compact
from engine.compute.sampling.row_groups import in_groups
from engine.plan.step_records import Int32, Int64, TokenLogprobs


def logprob_records(
    logits: torch.Tensor, num_logprobs: Int32, token_ids: list[int], source: Int64
) -> tuple[TokenLogprobs | None, ...] | None:
    """A record for each token that asks and was drawn; None when none asks.

    `source[r]` is the row of `logits` [R, vocab] that `token_ids[r]` came from, negative for no token;
    `num_logprobs[r]` is -1 for not asking.
    """
    if not (num_logprobs >= 0).any():
        return None
    records: list[TokenLogprobs | None] = [None] * len(token_ids)
    asking = np.flatnonzero((num_logprobs >= 0) & (source >= 0))
    for places in in_groups(len(asking), logits.shape[1]):
        group = asking[places]
        rows = logits[torch.from_numpy(source[group]).to(logits.device)].float()
        found = raw_logprobs(rows, [token_ids[row] for row in group], num_logprobs[group].tolist())
        for row, record in zip(group.tolist(), found, strict=True):
            records[row] = record
    return tuple(records)


def known_logprobs(logits: torch.Tensor, token_ids: Int64, num_top: Int32) -> list[TokenLogprobs | None]:
    """A record for each of the known `token_ids`; None for a row of `logits` that is not finite.

    `logits` is [rows, vocab] in any float type.
    """
    records: list[TokenLogprobs | None] = [None] * len(token_ids)
    sound = logits.amax(dim=1).isfinite().cpu().numpy()  # NaN wins
    rows = np.flatnonzero(sound)
    if len(rows):
        if len(rows) < len(records):
            logits = logits[torch.from_numpy(rows).to(logits.device)]
        found = raw_logprobs(logits.float(), token_ids[rows].tolist(), num_top[rows].tolist())
        for row, record in zip(rows.tolist(), found, strict=True):
            records[row] = record
    return records


def raw_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """The record of each row's token: its log-softmax in float32, its rank, the row's `num_top` likeliest.

    `logits` is float32 [rows, vocab] without NaN; `num_top` beyond the vocabulary gives all of it. The rank
    is 1 + the number of strictly likelier tokens; equally likely ones are listed in id order.
    """
    chosen = torch.tensor(token_ids, device=logits.device)  # [rows]
    return score(logits, chosen, max(num_top), _top).records(token_ids, num_top)


class RowScores(NamedTuple):
    """What the records of some rows are made of."""

    logprobs: torch.Tensor  # [rows] float32, of the chosen tokens
    ranks: torch.Tensor  # [rows] int64
    top_ids: torch.Tensor  # [rows, n] int64, likeliest first
    top_logprobs: torch.Tensor  # [rows, n] float32

    def records(self, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
        """The rows' records, of the tokens that were chosen; waits for the device where they are on one."""
        logprobs, ranks, top_ids, top_logprobs = (column.tolist() for column in self)
        top = [tuple(zip(*row, strict=True)) for row in zip(top_ids, top_logprobs, strict=True)]
        columns = zip(token_ids, logprobs, ranks, top, num_top, strict=True)
        return [TokenLogprobs(token, logprob, rank, row[:n]) for token, logprob, rank, row, n in columns]


def score(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    num_top: int,
    top: Callable[[torch.Tensor, int], torch.Tensor],
) -> RowScores:
    """The scores of the `chosen` [rows] tokens and of those that `top` finds, in the order of `raw_logprobs`.

    `top` gives the ids, [rows, n], for an n of 1 to vocab.
    """
    column = chosen.unsqueeze(1)  # [rows, 1]
    log_probs = torch.log_softmax(logits, dim=1)  # [rows, vocab]
    ranks = (logits > logits.gather(1, column)).sum(dim=1) + 1
    num_top = min(num_top, logits.shape[1])
    top_ids = top(logits, num_top) if num_top else column[:, :0]
    return RowScores(log_probs.gather(1, column).squeeze(1), ranks, top_ids, log_probs.gather(1, top_ids))


def _top(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """The `num_top` likeliest tokens of each row, in order."""  # [rows, num_top]
    # topk leaves the order of ties open: take its border value, then everything from there up in id order.
    border = logits.topk(num_top, dim=1).values[:, -1:]
    token_ids, valid = compact(logits >= border)
    candidates = logits.gather(1, token_ids).masked_fill_(~valid, -torch.inf)  # [rows, width]
    order = candidates.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    return token_ids.gather(1, order)
