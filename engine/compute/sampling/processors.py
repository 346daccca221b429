"""Temperature, top-k, top-p and min-p: from logits to the support, the tokens a row can draw.

Tokens are ordered by (logit descending, id ascending) and each filter keeps a prefix of that order, so ties
at a border fall to the lower ids and top-k 1 is greedy. A prefix is found by a histogram and a sort of the
one bin where it ends, never by sorting the vocabulary. Masses are whole numbers in float64, so their sums are
exact in any order: nothing here depends on the batch around a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling.noise import gumbel_of, noise_bits
from engine.plan.step_records import SamplingInputs

# The likeliest token's mass; the rest is floored to whole numbers. Sums stay exact up to 2^21 tokens.
_UNIT_MASS = 2.0**32
# Logit gaps fall into bins by their float32 exponent and three bits of fraction; infinity is the last bin.
_GAP_SHIFT = 20
_INFINITE_BIN = 0x7F800000 >> _GAP_SHIFT


@dataclass(frozen=True, slots=True)
class Filters:
    """The filter parameters of some rows, as [rows, 1] columns on the device; every temperature is above 0.

    The two flags are known on the host and save work: whether any row has a top-k, and whether any row has a
    top-p but no top-k.
    """

    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # float64, inf = off
    top_p: torch.Tensor  # float64, inf = off
    log_min_p: torch.Tensor  # float64, -inf = off
    any_top_k: bool
    any_top_p_alone: bool

    @classmethod
    def of_rows(
        cls, inputs: SamplingInputs, rows: NDArray[np.intp], vocab_size: int, device: torch.device
    ) -> Self:
        """The filters of the given rows; top-k 0 or from the vocabulary's size on and top-p 1 are off."""
        top_k = inputs.top_k[rows].astype(np.float64)
        top_k[(top_k <= 0) | (top_k >= vocab_size)] = np.inf
        top_p = inputs.top_p[rows].astype(np.float64)
        top_p[top_p >= 1] = np.inf
        with np.errstate(divide="ignore"):
            log_min_p = np.log(inputs.min_p[rows].astype(np.float64))
        any_top_k = bool(np.isfinite(top_k).any())
        any_top_p_alone = bool((np.isfinite(top_p) & np.isinf(top_k)).any())
        columns = (inputs.temperature[rows], top_k, top_p, log_min_p)
        temperature, count, share, log_share = (
            torch.from_numpy(column).to(device).unsqueeze(1) for column in columns
        )
        return cls(temperature, count, share, log_share, any_top_k, any_top_p_alone)

    def of_group(self, group: slice) -> Filters:
        """Those of some of the rows: views, and the flags of all."""
        columns = (self.temperature, self.top_k, self.top_p, self.log_min_p)
        temperature, top_k, top_p, log_min_p = (column[group] for column in columns)
        return Filters(temperature, top_k, top_p, log_min_p, self.any_top_k, self.any_top_p_alone)


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens each row can draw, in ascending id order, padded to the widest row.

    `scaled` is (logit - greatest logit) / temperature; -inf marks padding and tokens that were filtered out.
    """

    token_ids: torch.Tensor  # [rows, width] int64
    scaled: torch.Tensor  # [rows, width] float32

    def log_probs(self) -> torch.Tensor:
        """Natural logs of the probabilities the draw follows, float32 [rows, width]."""
        return torch.log_softmax(self.scaled, dim=1)

    def probs(self, vocab_size: int) -> torch.Tensor:
        """The probabilities the draw follows, spread over the vocabulary, float64 [rows, vocab]."""
        probs = self.scaled.new_zeros((len(self.scaled), vocab_size), dtype=torch.float64)
        # Padding repeats id 0 with probability 0, so adding is right where setting would not be.
        return probs.scatter_add_(1, self.token_ids, torch.softmax(self.scaled.double(), dim=1))

    def draw(self, keys: torch.Tensor) -> torch.Tensor:
        """One token a row, [rows], by the Gumbel-max rule under the noise of `keys` [rows, 2].

        Equal scores go to the lower id.
        """
        scores = self.scaled.double() + gumbel_of(noise_bits(keys, self.token_ids))
        return self.token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def process_logits(logits: torch.Tensor, filters: Filters) -> Support:
    """The exact support of each row under temperature, then top-k, then top-p, then min-p.

    `logits` is float32 [rows, vocab], already adjusted, each row's maximum finite; it is overwritten. top-p
    counts the renormalised top-k survivors and keeps at least one token; min-p is relative to the likeliest.
    """
    gaps = logits.sub_(logits.amax(dim=1, keepdim=True)).abs_()  # [rows, vocab], 0 at the likeliest token
    weight = torch.ones((), dtype=torch.float64, device=logits.device).expand_as(gaps)
    needed = filters.top_k  # [rows, 1]
    total = torch.ones_like(needed)  # [rows, 1] the whole row's mass where top-k does not cut it first
    if filters.any_top_p_alone:
        mass = masses(gaps, filters)
        total = mass.sum(dim=1, keepdim=True)
        needed = torch.where(filters.top_k.isinf(), filters.top_p * total, needed)
        weight = torch.where(filters.top_k.isinf(), mass, 1.0) if filters.any_top_k else mass
    bins, border, _ = _border_bin(gaps, weight, needed)
    token_ids, valid = compact(bins <= border.clamp(max=_INFINITE_BIN - 1))
    gaps = gaps.gather(1, token_ids).masked_fill_(~valid, torch.inf)  # [rows, width]
    kept = _kept(gaps, total, filters)
    scaled = gaps.div_(-filters.temperature)
    kept &= scaled >= filters.log_min_p
    return Support(token_ids, scaled.masked_fill_(~kept, -torch.inf))


def whole_rows(logits: torch.Tensor, filters: Filters) -> Support:
    """What `process_logits` gives for rows that top-k and top-p leave whole, unpadded: every token is listed.

    `logits` is float32 [rows, vocab], each row's maximum finite; it is overwritten.
    """
    gaps = logits.sub_(logits.amax(dim=1, keepdim=True)).abs_()  # [rows, vocab]
    scaled = gaps.div_(-filters.temperature)
    token_ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return Support(token_ids, scaled.masked_fill_(scaled < filters.log_min_p, -torch.inf))


def compact(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The marked columns of each row of a bool [rows, n], ascending and padded with 0, and which are real.

    Both results are [rows, width], width being the most marks in a row and at least 1.
    """
    row, column = mask.nonzero(as_tuple=True)  # [marks], row by row
    counts = torch.bincount(row, minlength=mask.shape[0])  # [rows]
    width = max(1, int(counts.max()))
    slot = torch.arange(len(row), device=mask.device) - (counts.cumsum(0) - counts)[row]
    columns = torch.zeros((mask.shape[0], width), dtype=torch.int64, device=mask.device)
    columns[row, slot] = column
    return columns, torch.arange(width, device=mask.device) < counts.unsqueeze(1)


def masses(gaps: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Unnormalised probabilities in whole units, float64."""
    return (gaps / -filters.temperature).exp_().mul_(_UNIT_MASS).floor_().double()


def _kept(gaps: torch.Tensor, total: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Marks what top-k then top-p keep of the candidates, a superset of it in id order."""  # [rows, width]
    mass = masses(gaps, filters)
    kept = torch.ones_like(gaps, dtype=torch.bool)
    if filters.any_top_k:
        kept = _prefix(gaps, torch.ones_like(mass), filters.top_k)
        mass *= kept
        total = torch.where(filters.top_k.isinf(), total, mass.sum(dim=1, keepdim=True))
    return kept & _prefix(gaps, mass, filters.top_p * total)


def _prefix(gaps: torch.Tensor, weight: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Marks the shortest prefix, smallest gaps first and then lower columns, that weighs `needed`.

    At least the first token, and all of them when they weigh less. `gaps` and `weight` are [rows, n].
    """
    bins, border, before = _border_bin(gaps, weight, needed)
    column, valid = compact(bins == border)  # [rows, width]
    gap, order = gaps.gather(1, column).masked_fill_(~valid, torch.inf).sort(dim=1, stable=True)
    column = column.gather(1, order)
    weight = weight.gather(1, column) * valid  # padding is last in the order as before it, so `valid` holds
    inside = (before + weight.cumsum(dim=1) - weight < needed) & valid
    last = inside.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0)  # [rows, 1]
    gap, column = gap.gather(1, last), column.gather(1, last)
    tied = torch.arange(gaps.shape[1], device=gaps.device) <= column
    return (gaps < gap) | ((gaps == gap) & tied)


def _border_bin(
    gaps: torch.Tensor, weight: torch.Tensor, needed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's bin, the bin in which the weight summed from gap 0 on reaches `needed`, the weight before.

    Shapes [rows, n], [rows, 1], [rows, 1]. The border is the bin of infinite gaps if `needed` is not reached.
    """
    # Floats from +0 on are ordered as their bits.
    bins = (gaps.view(torch.int32) >> _GAP_SHIFT).to(torch.int64)  # [rows, n]
    weights = torch.zeros((len(gaps), _INFINITE_BIN + 1), dtype=torch.float64, device=gaps.device)
    sums = weights.scatter_add_(1, bins, weight).cumsum(dim=1)  # [rows, bins]
    border = (sums < needed).sum(dim=1, keepdim=True).clamp_(max=_INFINITE_BIN)  # sums never fall
    return bins, border, (sums - weights).gather(1, border)
