"""What a sampled row must be: a plain float64 reading of the pipeline, sampling inputs by row, chi-square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling.adjustments import apply_adjustments
from engine.compute.sampling.noise import row_keys
from engine.compute.sampling.processors import Filters, Support, process_logits
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import LogitAdjustment, SamplingInputs, TokenCounts

Float64 = NDArray[np.float64]
CPU = torch.device("cpu")
NEUTRAL = LogitAdjustment(row=0)


@dataclass(frozen=True)
class Row:
    """One row's sampling parameters; `adjustment.row` is ignored."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    num_logprobs: int = -1
    adjustment: LogitAdjustment = NEUTRAL


def adjusted(row: Row, **fields: Any) -> Row:
    return replace(row, adjustment=replace(row.adjustment, **fields))


def counted(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> TokenCounts:
    """The tokens of a prompt and an output, counted in the plainest way."""
    token_ids = sorted({*prompt, *output})
    in_output = [list(output).count(token_id) for token_id in token_ids]
    return TokenCounts(np.array(token_ids, np.int64), np.array(in_output, np.int64))


def inputs_of(rows: Sequence[Row]) -> SamplingInputs:
    adjustments = [replace(row.adjustment, row=index) for index, row in enumerate(rows)]
    return SamplingInputs(
        temperature=np.array([row.temperature for row in rows], dtype=np.float32),
        top_k=np.array([row.top_k for row in rows], dtype=np.int32),
        top_p=np.array([row.top_p for row in rows], dtype=np.float32),
        min_p=np.array([row.min_p for row in rows], dtype=np.float32),
        seed=np.array([row.seed for row in rows], dtype=np.int64),
        position=np.array([row.position for row in rows], dtype=np.int64),
        num_logprobs=np.array([row.num_logprobs for row in rows], dtype=np.int32),
        adjustments=tuple(a for a in adjustments if a != replace(NEUTRAL, row=a.row)),
    )


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The tokens of a step that must not have errors."""
    result = Sampler(logits.shape[1], CPU).sample(logits, inputs_of(rows))
    assert result.row_errors is None
    return result.token_ids


def support_of(logits: torch.Tensor, rows: Sequence[Row]) -> Support:
    """The support of rows without adjustments."""
    filters = Filters.of_rows(inputs_of(rows), np.arange(len(rows)), logits.shape[1], CPU)
    return process_logits(logits.clone(), filters)


def engine_probs(logits: torch.Tensor, rows: Sequence[Row]) -> Float64:
    """The probabilities the engine draws from, adjustments included; no row may fail."""  # [rows, vocab]
    logits = logits.clone()
    assert apply_adjustments(logits, [row.adjustment for row in rows]) == {}
    return dense_probs(support_of(logits, rows), logits.shape[1])


def dense_probs(support: Support, vocab_size: int) -> Float64:
    """The probabilities of a support, spread over the vocabulary."""  # [rows, vocab]
    probs = torch.zeros(len(support.token_ids), vocab_size, dtype=torch.float64)
    # Padding repeats id 0 with probability 0, so adding is right where setting would not be.
    return probs.scatter_add_(1, support.token_ids, support.log_probs().double().exp()).numpy()


def dense_draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The draw over every token of each row, without shortcuts; rows have no adjustments."""
    inputs = inputs_of(rows)
    everything = torch.arange(logits.shape[1]).expand(logits.shape)
    scaled = torch.full(logits.shape, -torch.inf)
    support = support_of(logits, rows)
    for row in range(len(rows)):
        finite = support.scaled[row].isfinite()
        scaled[row, support.token_ids[row, finite]] = support.scaled[row, finite]
    return Support(everything, scaled).draw(row_keys(inputs.seed, inputs.position)).tolist()


# The pipeline with one mistake each, to show that the comparisons would find it.
MISTAKES = (
    "presence on the prompt",
    "repetition on the output only",
    "repetition always divides",
    "frequency without counts",
    "top-p before top-k",
    "top-p without the crossing token",
    "top-p with one token too many",
    "top-k with one token too few",
    "min-p absolute",
    "temperature last",
    "penalties after temperature",
    "bias after temperature",
)


def reference_probs(logits: Float64, row: Row, mistake: str | None = None) -> Float64:
    """The probabilities of one row; all zero when no token is left. Independent of the engine's code."""
    assert mistake is None or mistake in MISTAKES
    scores = logits.astype(np.float64).copy()
    temperature = float(np.float32(row.temperature))
    if mistake == "penalties after temperature":
        scores = _penalised(_biased(scores, row) / temperature, row, mistake)
    elif mistake == "bias after temperature":
        scores = _biased(_penalised(scores, row, mistake) / temperature, row)
    elif mistake == "temperature last":
        scores = _penalised(_biased(scores, row), row, mistake)
    else:
        scores = _penalised(_biased(scores, row), row, mistake) / temperature
    if not np.isfinite(scores.max()):
        return np.zeros_like(scores)
    kept = _filtered(scores, row, mistake)
    if mistake == "temperature last":
        scores = scores / temperature
    return _softmax(np.where(kept, scores, -np.inf))


def border_margin(logits: Float64, row: Row) -> float:
    """How far the row's filters are from deciding otherwise: below float32's rounding nothing is promised."""
    scores = _penalised(_biased(logits.astype(np.float64), row), row, None) / float(
        np.float32(row.temperature)
    )
    if not np.isfinite(scores.max()):
        return np.inf
    top_k = row.top_k if 0 < row.top_k < len(scores) else len(scores)
    order = np.argsort(-scores, kind="stable")[:top_k]
    sums = np.cumsum(_softmax(scores[order]))
    margins = [np.inf]
    if row.top_p < 1:
        margins.append(np.abs(sums - float(np.float32(row.top_p))).min())
    if np.float32(row.min_p) > 0:
        margins.append(np.abs(scores[order] - scores.max() - np.log(float(np.float32(row.min_p)))).min())
    return float(min(margins))


def chi_square_p(observed: Sequence[int], probs: Float64) -> float:
    """P(counts at least this far from `probs`); rare tokens are pooled, impossible ones must not occur."""
    counts = np.bincount(np.asarray(observed), minlength=len(probs)).astype(np.float64)
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom >= statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _biased(scores: Float64, row: Row) -> Float64:
    scores = scores.copy()
    for token_id, bias in row.adjustment.logit_bias:
        scores[token_id] += bias
    if row.adjustment.allowed_token_ids is not None:
        for token_id in range(len(scores)):
            if token_id not in row.adjustment.allowed_token_ids:
                scores[token_id] = -np.inf
    for token_id in row.adjustment.banned_token_ids:
        scores[token_id] = -np.inf
    return scores


def _penalised(scores: Float64, row: Row, mistake: str | None) -> Float64:
    scores = scores.copy()
    adjustment = row.adjustment
    history = counted() if adjustment.history is None else adjustment.history
    tokens = dict(zip(history.token_ids.tolist(), history.in_output.tolist(), strict=True))
    output = {token_id: count for token_id, count in tokens.items() if count}
    seen = output if mistake == "repetition on the output only" else tokens
    for token_id in seen:
        divides = scores[token_id] > 0 or mistake == "repetition always divides"
        factor = 1 / adjustment.repetition_penalty if divides else adjustment.repetition_penalty
        scores[token_id] *= factor
    for token_id in tokens if mistake == "presence on the prompt" else output:
        scores[token_id] -= adjustment.presence_penalty
    for token_id, count in output.items():
        scores[token_id] -= adjustment.frequency_penalty * (
            1 if mistake == "frequency without counts" else count
        )
    return scores


def _filtered(scores: Float64, row: Row, mistake: str | None) -> NDArray[np.bool_]:
    order = np.argsort(-scores, kind="stable")
    top_k = row.top_k if 0 < row.top_k < len(scores) else len(scores)
    if mistake == "top-k with one token too few":
        top_k = max(1, top_k - 1)
    survivors = order if mistake == "top-p before top-k" else order[:top_k]
    probs = _softmax(scores[survivors])
    if row.top_p < 1:
        length = 1 + int(np.sum(np.cumsum(probs) < float(np.float32(row.top_p))))
        length += {"top-p without the crossing token": -1, "top-p with one token too many": 1}.get(
            mistake or "", 0
        )
        survivors = survivors[: max(1, length)]
    survivors = survivors[:top_k]
    highest = (
        _softmax(scores)[survivors]
        if mistake == "min-p absolute"
        else np.exp(scores[survivors] - scores.max())
    )
    survivors = survivors[(highest >= float(np.float32(row.min_p))) | (np.arange(len(survivors)) == 0)]
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[survivors] = True
    return kept


def _softmax(scores: Float64) -> Float64:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
