"""The draw of rows with top-k, top-p or both in Triton: `draw_filtered` of `device_draw` without its sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.compute.cuda.triton_border import (
    CHUNK,
    MOST_PARTS,
    Rows,
    find_borders,
    load_border,
    scaled_gaps,
    token_gaps,
)
from engine.compute.cuda.triton_draw import gumbel_noise
from engine.compute.sampling.processors import Filters
from engine.plan.step_records import NO_TOKEN

_ROWS_AT_ONCE = 128  # they fill a device, and their sums take 25 MB


@triton.jit(do_not_specialize=["chunks"])
def kept_score_kernel(
    logits,
    places,
    best,
    temperature,
    log_min_p,
    noise_keys,
    borders,
    ties,
    scores,
    gaps,
    token_ids,
    row_stride,
    vocab_size,
    chunks,
    MOST_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The highest score of the kept tokens in one part of a row, and whose it is; grid (rows, parts).

    Results are [rows, parts]. Of equal scores that of the smaller gap is taken, then that of the lower id.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(1)
    place, heat = tl.load(places + row), tl.load(temperature + row)
    least = tl.load(log_min_p + row)
    low = tl.load(noise_keys + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(noise_keys + row * 2 + 1).to(tl.uint32, bitcast=True)
    border, left, is_cut = load_border(borders, row)
    if is_cut:
        other = tl.arange(0, MOST_PARTS)
        left -= tl.sum(tl.load(ties + row * num_parts + other, mask=other < part, other=0).to(tl.int64), 0)
    best_score = tl.full((CHUNK,), float("-inf"), tl.float64)
    best_gap = tl.full((CHUNK,), float("inf"), tl.float32)
    best_token = tl.zeros((CHUNK,), tl.int32) + vocab_size
    for chunk in range(part * chunks, tl.minimum((part + 1) * chunks, tl.cdiv(vocab_size, CHUNK))):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        gap = token_gaps(logits, place, best, token, row_stride, vocab_size)
        key = gap.to(tl.int32, bitcast=True).to(tl.int64)
        is_kept = (token < vocab_size) & (key <= border)
        if is_cut:
            is_tied = ((token < vocab_size) & (key == border)).to(tl.int64)
            is_kept = is_kept & ((is_tied == 0) | (tl.cumsum(is_tied, 0) <= left))
            left -= tl.sum(is_tied, 0)
        scaled = scaled_gaps(gap, heat).to(tl.float64)
        is_kept = is_kept & (scaled >= least)
        if tl.max(is_kept.to(tl.int32), 0) != 0:  # the noise is dear, and most of a row is not kept
            score = tl.where(is_kept, scaled + gumbel_noise(token, low, high), float("-inf"))
            is_better = (score > best_score) | ((score == best_score) & (gap < best_gap))
            best_score = tl.where(is_better, score, best_score)
            best_gap = tl.where(is_better, gap, best_gap)
            best_token = tl.where(is_better, token, best_token)
    at = row * num_parts + part
    score, gap, token = _first_of_best(best_score, best_gap, best_token, vocab_size)
    tl.store(scores + at, score)
    tl.store(gaps + at, gap)
    tl.store(token_ids + at, token)


@triton.jit
def _first_of_best(score, gap, token, vocab_size):
    """The highest score, the smallest gap that has it, and the lowest id that has both."""
    highest = tl.max(score, 0)
    nearest = tl.min(tl.where(score == highest, gap, float("inf")), 0)
    first = tl.min(tl.where((score == highest) & (gap == nearest), token, vocab_size), 0)
    return highest, nearest, first


@triton.jit(do_not_specialize=["num_parts"])
def pick_kernel(
    places,
    best,
    scores,
    gaps,
    token_ids,
    drawn,
    vocab_size,
    num_parts,
    NONE: tl.constexpr,
    MOST: tl.constexpr,
):
    """The token of each row's best part, or NONE where the greatest logit is not finite; grid (rows)."""
    row = tl.program_id(0)
    part = tl.arange(0, MOST)
    at, is_part = row * num_parts + part, part < num_parts
    score = tl.load(scores + at, mask=is_part, other=float("-inf"))
    gap = tl.load(gaps + at, mask=is_part, other=float("inf"))
    token = tl.load(token_ids + at, mask=is_part, other=0)
    token = tl.where(is_part, token, vocab_size)
    _score, _gap, first = _first_of_best(score, gap, token, vocab_size)
    is_finite = tl.abs(tl.load(best + tl.load(places + row)).to(tl.float32)) < float("inf")
    tl.store(drawn + row, tl.where(is_finite, first, NONE).to(tl.int64))


def draw_filtered_at_once(
    logits: torch.Tensor, places: torch.Tensor, filters: Filters, keys: torch.Tensor
) -> torch.Tensor:
    """See `draw_filtered`; each row of `logits` is dense. Beside them some 200 KB are used for a row."""
    best = logits.amax(dim=1)  # [places]; NaN wins
    groups = (slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(places), _ROWS_AT_ONCE))
    drawn = torch.empty(len(places), dtype=torch.int64, device=logits.device)
    for group in groups:
        _draw(Rows(logits, places[group], best, filters.of_group(group)), keys[group], drawn[group])
    return drawn


def _draw(rows: Rows, keys: torch.Tensor, drawn: torch.Tensor) -> None:
    """Write a token for each of the rows to `drawn` [n]."""
    logits, filters, device = rows.logits, rows.filters, rows.logits.device
    borders = find_borders(rows)
    parts, chunks = rows.parts(CHUNK)
    grid = (len(drawn), parts)
    scores = torch.empty(grid, dtype=torch.float64, device=device)
    gaps = torch.empty(grid, dtype=torch.float32, device=device)
    token_ids = torch.empty(grid, dtype=torch.int32, device=device)
    kept_score_kernel[grid](
        logits,
        rows.places,
        rows.best,
        filters.temperature,
        filters.log_min_p,
        keys,
        borders.fields,
        borders.ties,
        scores,
        gaps,
        token_ids,
        logits.stride(0),
        logits.shape[1],
        chunks,
        MOST_PARTS=MOST_PARTS,
        CHUNK=CHUNK,
    )
    pick_kernel[(len(drawn),)](
        rows.places,
        rows.best,
        scores,
        gaps,
        token_ids,
        drawn,
        logits.shape[1],
        parts,
        NONE=NO_TOKEN,
        MOST=MOST_PARTS,
    )
