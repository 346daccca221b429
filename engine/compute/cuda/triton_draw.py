"""The plain draw of `device_draw` in one sweep over the logits, in Triton.

The noise's logarithms are taken in float64 where they are used, so that nothing but the logits is read and
next to nothing written. Its numbers are those of `noise`: the same hash, the same distribution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.compute.cuda.device_draw import DrawColumns
from engine.plan.step_records import NO_TOKEN

_CHUNK = 1024  # tokens of a program


@triton.jit
def _mixed(bits):
    """Two multiplications with folds before them, of `noise`; logical shifts, as the words are unsigned."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    return (bits ^ (bits >> 15)) * 0x846CA68B


@triton.jit
def gumbel_noise(token, low, high):
    """The noise of `gumbel_of(noise_bits(...))`, float64, for tokens under the two words of a row's key."""
    bits = _mixed(token.to(tl.uint32) ^ low)
    bits = _mixed(bits + high)
    bits = bits ^ (bits >> 16) ^ 0x80000000  # which the other adds, as it counts from the least number
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # over 2^32: exact
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["vocab_size"])
def score_kernel(
    logits,
    best,
    temperature,
    log_min_p,
    noise_keys,
    scores,
    token_ids,
    row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """The highest score of CHUNK tokens of one row, and whose it is; grid (rows, chunks).

    Greedy rows are left out. `scores` and `token_ids` are [rows, chunks]; equal scores go to the lower id.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = token < vocab_size
        logit = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=is_token, other=float("-inf"))
        gap = tl.abs(logit.to(tl.float32) - tl.load(best + row).to(tl.float32))
        scaled = tl.div_rn(gap, tl.zeros_like(gap) - heat).to(tl.float64)
        low = tl.load(noise_keys + row * 2).to(tl.uint32, bitcast=True)
        high = tl.load(noise_keys + row * 2 + 1).to(tl.uint32, bitcast=True)
        kept = is_token & (scaled >= tl.load(log_min_p + row))
        score = tl.where(kept, scaled + gumbel_noise(token, low, high), float("-inf"))
        highest = tl.max(score, 0)
        first = tl.min(tl.where(score == highest, token, vocab_size), 0)
        place = row * tl.num_programs(1) + chunk
        tl.store(scores + place, highest)
        tl.store(token_ids + place, first)


def draw_plain_at_once(logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """See `draw_plain`; the rows of `logits` are dense."""
    num_rows, vocab_size = logits.shape
    best = logits.max(dim=1)  # NaN wins
    shape = (num_rows, triton.cdiv(vocab_size, _CHUNK))
    scores = torch.empty(shape, dtype=torch.float64, device=logits.device)
    token_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    score_kernel[shape](
        logits,
        best.values,
        columns.temperature,
        columns.log_min_p,
        columns.keys,
        scores,
        token_ids,
        logits.stride(0),
        vocab_size,
        CHUNK=_CHUNK,
    )
    winner = scores.argmax(dim=1, keepdim=True)  # of equal chunks the first
    drawn = token_ids.gather(1, winner).squeeze(1).long()
    drawn = torch.where(columns.temperature.squeeze(1) > 0, drawn, best.indices)
    return drawn.masked_fill_(~best.values.isfinite(), NO_TOKEN)
