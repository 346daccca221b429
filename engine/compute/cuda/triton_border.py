"""Where the tokens end that top-k and top-p keep of a row, found without sorting it, in Triton.

A radix selection: gaps to the likeliest token are ordered as their bits, the keys. Weights are summed by the
first digits of the keys, the bin is taken in which they reach what is needed, and its tokens are summed by
their next digits, until one gap is left. The first digit is chosen for what logits are like: with so few bins
its sums stay in registers, and few tokens are left in any one for the atomic additions that follow. Weights
are whole numbers: their sums are exact in any order, however many programs share a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.compute.sampling.processors import Filters

# Triton's own exp is an approximation. libdevice's becomes the instructions that torch's kernel has, but for
# subnormal numbers, whose masses are 0 anyway. The interpreter has numpy's in its place.
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)

# The survey's bins end at gaps of 2, 2.5, 3, 3.5, 4, 5, 6 … 24, and where all gaps end.
EDGES = tl.constexpr(16)
_FIRST_EDGE = tl.constexpr(0x40000000 >> 21)
_EDGE_BITS = tl.constexpr(21)
_COUNTED = tl.constexpr(1 << 46)  # above the masses of 2^14 chunks: counts and masses are summed in one
_OUTER_BITS = tl.constexpr(30)  # as many hold the keys of the first and of the last bin
_KEY_END = tl.constexpr(0x7F800001)  # one more than the key of an infinite gap
_DIGIT_BITS = tl.constexpr(11)
BINS = tl.constexpr(2048)

# The fields of a row's border, and the values of its STAGE: which weights are summed, or that it is found.
FIELDS = tl.constexpr(6)
_STAGE, LOW, _BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LEFT, _PASSED, IS_CUT = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_COUNTING, _WEIGHING, _FOUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_STEPS = 6  # 30 bits are three digits, once by counts and once by masses
_SURVEY_CHUNK, CHUNK = 256, 1024  # tokens that a program looks at together
_PROGRAMS = 512  # together on the device: a few for each of its processors
MOST_PARTS = 512  # of a row


@triton.jit
def token_gaps(logits, place, best, token, row_stride, vocab_size):
    """The gaps of some tokens of the row at `place`, float32, infinite past the vocabulary's end."""
    at = logits + place.to(tl.int64) * row_stride + token
    logit = tl.load(at, mask=token < vocab_size, other=float("-inf"))
    return tl.abs(logit.to(tl.float32) - tl.load(best + place).to(tl.float32))


@triton.jit
def scaled_gaps(gap, heat):
    """-gap / temperature, rounded as torch rounds it."""
    return tl.div_rn(gap, tl.zeros_like(gap) - heat)


@triton.jit
def _masses(gap, heat):
    """`masses` of `processors`, int64."""
    scaled = scaled_gaps(gap, heat)
    share = libdevice.exp(scaled) if _HAS_LIBDEVICE else tl.exp(scaled)
    return (share * 4294967296.0).to(tl.int64)


@triton.jit
def _share_of(share, total):
    """The least whole number that is at least this share of `total`, and at least 1."""
    return tl.maximum(tl.ceil(tl.minimum(share * total.to(tl.float64), 9007199254740992.0)), 1.0).to(tl.int64)


@triton.jit
def _first_range(below, masses, needed):
    """The survey's bin in which the weights `below` its edges reach `needed`: (low, bits, left, passed)."""
    edge = tl.arange(0, EDGES)
    reached = tl.sum((below < needed).to(tl.int64), 0)
    is_before = edge == reached - 1
    low = tl.where(reached == 0, 0, (reached + (_FIRST_EDGE - 1)) << _EDGE_BITS)
    bits = tl.where((reached == 0) | (reached >= EDGES - 1), _OUTER_BITS, _EDGE_BITS).to(tl.int64)
    left = needed - tl.sum(tl.where(is_before, below, 0), 0)
    return low, bits, left, tl.sum(tl.where(is_before, masses, 0), 0)


@triton.jit
def _begun(surveyed, row, top_k, top_p):
    """A row's state after the survey: (stage, low, bits, left, passed, is_cut)."""
    edge = tl.arange(0, EDGES)
    counts = tl.load(surveyed + row * (2 * EDGES) + edge)
    masses = tl.load(surveyed + row * (2 * EDGES) + EDGES + edge)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    is_counted = count < float("inf")
    needed = tl.where(
        is_counted, _share_of(count, tl.full((), 1, tl.int64)), _share_of(share, tl.max(masses, 0))
    )
    low, bits, left, passed = _first_range(tl.where(is_counted, counts, masses), masses, needed)
    stage = tl.where(is_counted, _COUNTING, tl.where(share < float("inf"), _WEIGHING, _FOUND)).to(tl.int64)
    low = tl.where(stage == _FOUND, _KEY_END, low)
    return stage, low, bits, left, passed, stage * 0


@triton.jit
def _narrowed(states, tallies, surveyed, row, step, temperature, top_p):
    """A row's state at `step`, after the digit of the one before was summed; see `_begun`.

    A border that is found stays.
    """
    place = (step - 1) * tl.num_programs(0) + row
    at, sums = states + place * FIELDS, tallies + place * (2 * BINS)
    stage, low, bits = tl.load(at + _STAGE), tl.load(at + LOW), tl.load(at + _BITS)
    left, passed, is_cut = tl.load(at + LEFT), tl.load(at + _PASSED), tl.load(at + IS_CUT)
    if stage != _FOUND:
        digit = tl.arange(0, BINS)
        masses = tl.load(sums + BINS + digit)
        weights = masses
        if stage == _COUNTING:
            weights = tl.load(sums + digit)
        border = tl.sum((tl.cumsum(weights, 0) < left).to(tl.int64), 0)
        weight = tl.sum(tl.where(digit == border, weights, 0), 0)
        left -= tl.sum(tl.where(digit < border, weights, 0), 0)
        passed += tl.sum(tl.where(digit < border, masses, 0), 0)
        bits = tl.maximum(bits - _DIGIT_BITS, 0)
        low += border << bits
        if bits == 0:
            share = tl.load(top_p + row)
            mass = _masses(low.to(tl.int32).to(tl.float32, bitcast=True), tl.load(temperature + row))
            if (stage == _COUNTING) & (share < float("inf")):
                # What top-k keeps is a prefix, so that top-p's border is found as if it were the whole row.
                needed = _share_of(share, passed + left * mass)
                edge = tl.arange(0, EDGES)
                below = tl.load(surveyed + row * (2 * EDGES) + EDGES + edge)
                low, bits, left, passed = _first_range(below, below, needed)
                stage = tl.full((), _WEIGHING, tl.int64)
            else:
                each = tl.where(stage == _COUNTING, 1, tl.maximum(mass, 1))
                left = (left + each - 1) // each
                is_cut = (weight > left * each).to(tl.int64)
                stage = tl.full((), _FOUND, tl.int64)
    return stage, low, bits, left, passed, is_cut


@triton.jit
def _keep_state(states, row, step, stage, low, bits, left, passed, is_cut):
    at = states + (step * tl.num_programs(0) + row) * FIELDS
    tl.store(at + _STAGE, stage)
    tl.store(at + LOW, low)
    tl.store(at + _BITS, bits)
    tl.store(at + LEFT, left)
    tl.store(at + _PASSED, passed)
    tl.store(at + IS_CUT, is_cut)


@triton.jit(do_not_specialize=["chunks"])
def survey_kernel(
    logits, places, best, temperature, surveyed, row_stride, vocab_size, chunks, CHUNK: tl.constexpr
):
    """Adds the counts and the masses below each edge to `surveyed` [rows, 2, EDGES]; grid (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    place, heat = tl.load(places + row), tl.load(temperature + row)
    edge = tl.arange(0, EDGES)
    end = tl.where(edge == EDGES - 1, _KEY_END, (_FIRST_EDGE + edge) << _EDGE_BITS)[:, None]
    sums = tl.zeros((EDGES, CHUNK), tl.int64)  # of counts above, of masses below
    for chunk in range(part * chunks, tl.minimum((part + 1) * chunks, tl.cdiv(vocab_size, CHUNK))):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        gap = token_gaps(logits, place, best, token, row_stride, vocab_size)
        key = tl.where(token < vocab_size, gap.to(tl.int32, bitcast=True), _KEY_END)
        one = _masses(gap, heat) + _COUNTED
        sums += tl.where(key[None, :] < end, one[None, :], 0)
    at = surveyed + row * (2 * EDGES) + edge
    tl.atomic_add(at, tl.sum(sums // _COUNTED, 1), sem="relaxed")
    tl.atomic_add(at + EDGES, tl.sum(sums % _COUNTED, 1), sem="relaxed")


@triton.jit(do_not_specialize=["step", "chunks"])
def digit_kernel(
    logits,
    places,
    best,
    temperature,
    top_k,
    top_p,
    surveyed,
    states,
    tallies,
    row_stride,
    vocab_size,
    step,
    chunks,
    CHUNK: tl.constexpr,
):
    """Sums one more digit of the keys in each row's range; grid (rows, parts), one launch for each step.

    `states` is [steps + 1, rows, FIELDS], `tallies` [steps, rows, 2, BINS]: counts and masses. Every program
    of a row works out the state that the last step has led to, and the first one keeps it.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if step == 0:
        stage, low, bits, left, passed, is_cut = _begun(surveyed, row, top_k, top_p)
    else:
        stage, low, bits, left, passed, is_cut = _narrowed(
            states, tallies, surveyed, row, step, temperature, top_p
        )
    if part == 0:
        _keep_state(states, row, step, stage, low, bits, left, passed, is_cut)
    if stage != _FOUND:
        place, heat = tl.load(places + row), tl.load(temperature + row)
        at = tallies + (step * tl.num_programs(0) + row) * (2 * BINS)
        first, shift = low.to(tl.int32), tl.maximum(bits - _DIGIT_BITS, 0).to(tl.int32)
        is_counted = stage == _COUNTING
        for chunk in range(part * chunks, tl.minimum((part + 1) * chunks, tl.cdiv(vocab_size, CHUNK))):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            gap = token_gaps(logits, place, best, token, row_stride, vocab_size)
            key = gap.to(tl.int32, bitcast=True)
            is_inside = (token < vocab_size) & (key >= first) & ((key - first) >> bits.to(tl.int32) == 0)
            if tl.max(is_inside.to(tl.int32), 0) != 0:  # in the later steps few chunks have any
                digit = tl.where(is_inside, (key - first) >> shift, 0)
                if is_counted:
                    ones = tl.full((CHUNK,), 1, tl.int64)
                    tl.atomic_add(at + digit, ones, mask=is_inside, sem="relaxed")
                tl.atomic_add(at + BINS + digit, _masses(gap, heat), mask=is_inside, sem="relaxed")


@triton.jit(do_not_specialize=["step", "chunks"])
def tie_kernel(
    logits,
    places,
    best,
    temperature,
    top_p,
    surveyed,
    states,
    tallies,
    ties,
    row_stride,
    vocab_size,
    step,
    chunks,
    CHUNK: tl.constexpr,
):
    """Keeps each row's last state, and the tokens at the border of each part in `ties` [rows, parts].

    Grid (rows, parts). Where all tokens at the border are kept, nobody asks for `ties`, and it stays.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    stage, low, bits, left, passed, is_cut = _narrowed(
        states, tallies, surveyed, row, step, temperature, top_p
    )
    if part == 0:
        _keep_state(states, row, step, stage, low, bits, left, passed, is_cut)
    if is_cut != 0:
        place, border = tl.load(places + row), low.to(tl.int32)
        tied = tl.zeros((CHUNK,), tl.int32)
        for chunk in range(part * chunks, tl.minimum((part + 1) * chunks, tl.cdiv(vocab_size, CHUNK))):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            gap = token_gaps(logits, place, best, token, row_stride, vocab_size)
            key = gap.to(tl.int32, bitcast=True)
            tied += ((token < vocab_size) & (key == border)).to(tl.int32)
        tl.store(ties + row * tl.num_programs(1) + part, tl.sum(tied, 0))


@triton.jit
def load_border(borders, row):
    """(LOW, LEFT, IS_CUT) of a row: see Borders."""
    at = borders + row * FIELDS
    return tl.load(at + LOW), tl.load(at + LEFT), tl.load(at + IS_CUT) != 0


class Rows(NamedTuple):
    """Rows of `logits` and what filters them, on the device."""

    logits: torch.Tensor  # [places, vocab], each row dense, in any float type
    places: torch.Tensor  # int64 [n]
    best: torch.Tensor  # [places], the greatest logit of each
    filters: Filters  # of the n rows

    def parts(self, chunk: int) -> tuple[int, int]:
        """Into how many parts each row is divided, and how many chunks are one."""
        num_chunks = triton.cdiv(self.logits.shape[1], chunk)
        most = max(1, min(MOST_PARTS, _PROGRAMS // len(self.places)))
        chunks = triton.cdiv(num_chunks, min(most, num_chunks))
        return triton.cdiv(num_chunks, chunks), chunks


class Borders(NamedTuple):
    """Which tokens are kept: those whose keys are below LOW, and of those whose keys are LOW the first by id.

    LEFT of them, if IS_CUT, else all; `ties` says for a row that is cut how many lie in each of its parts,
    those of `Rows.parts(CHUNK)`. min-p is not looked at.
    """

    fields: torch.Tensor  # int64 [n, FIELDS]
    ties: torch.Tensor  # int32 [n, parts]


def find_borders(rows: Rows) -> Borders:
    """The borders of all rows, of top-k and then top-p over its survivors; nothing waits for the device.

    What they keep is what `process_logits` keeps on the same device: gaps and sums are the same numbers, and
    so are masses wherever torch's `exp` has libdevice's instructions, as on CUDA. Every shape is known
    beforehand. Rows whose greatest logit is not finite get any border.
    """
    logits, filters, num_rows = rows.logits, rows.filters, len(rows.places)
    survey_sums, digit_sums = num_rows * 2 * EDGES.value, _STEPS * num_rows * 2 * BINS.value
    sums = torch.zeros(survey_sums + digit_sums, dtype=torch.int64, device=logits.device)
    surveyed, tallies = sums[:survey_sums], sums[survey_sums:]
    states = torch.empty((_STEPS + 1, num_rows, FIELDS.value), dtype=torch.int64, device=logits.device)
    read = (logits, rows.places, rows.best, filters.temperature)
    sizes = (logits.stride(0), logits.shape[1])
    parts, chunks = rows.parts(_SURVEY_CHUNK)
    survey_kernel[(num_rows, parts)](*read, surveyed, *sizes, chunks, CHUNK=_SURVEY_CHUNK)
    parts, chunks = rows.parts(CHUNK)
    grid = (num_rows, parts)
    for step in range(_STEPS):
        digit_kernel[grid](
            *read, filters.top_k, filters.top_p, surveyed, states, tallies, *sizes, step, chunks, CHUNK=CHUNK
        )
    ties = torch.empty(grid, dtype=torch.int32, device=logits.device)
    tie_kernel[grid](
        *read, filters.top_p, surveyed, states, tallies, ties, *sizes, _STEPS, chunks, CHUNK=CHUNK
    )
    return Borders(states[_STEPS], ties)
