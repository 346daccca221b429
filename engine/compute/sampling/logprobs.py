"""Log-probabilities as the model gave them, before any processor, for the rows that ask."""

from __future__ import annotations

import numpy as np
import torch

from engine.compute.sampling.processors import compact
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
    if len(asking):
        rows = logits[torch.from_numpy(source[asking]).to(logits.device)].float()
        found = raw_logprobs(rows, [token_ids[row] for row in asking], num_logprobs[asking].tolist())
        for row, record in zip(asking.tolist(), found, strict=True):
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
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)  # [rows, 1]
    log_probs = torch.log_softmax(logits, dim=1)  # [rows, vocab]
    ranks = (logits > logits.gather(1, chosen)).sum(dim=1) + 1
    top = _top(logits, log_probs, max(num_top))
    columns = zip(
        token_ids, log_probs.gather(1, chosen)[:, 0].tolist(), ranks.tolist(), top, num_top, strict=True
    )
    return [TokenLogprobs(token, logprob, rank, row[:n]) for token, logprob, rank, row, n in columns]


def _top(logits: torch.Tensor, log_probs: torch.Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    """The `num_top` likeliest tokens of each row with their log-probabilities, in order."""
    num_top = min(num_top, logits.shape[1])
    if num_top == 0:
        return [()] * logits.shape[0]
    # topk leaves the order of ties open: take its border value, then everything from there up in id order.
    border = logits.topk(num_top, dim=1).values[:, -1:]
    token_ids, valid = compact(logits >= border)
    candidates = logits.gather(1, token_ids).masked_fill_(~valid, -torch.inf)  # [rows, width]
    order = candidates.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    token_ids = token_ids.gather(1, order)  # [rows, num_top]
    values = log_probs.gather(1, token_ids)
    return [tuple(zip(*row, strict=True)) for row in zip(token_ids.tolist(), values.tolist(), strict=True)]
