"""One batched draw for all rows of a step: which rows need what, and what went wrong in which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling.adjustments import apply_adjustments
from engine.compute.sampling.logprobs import logprob_records
from engine.compute.sampling.noise import (
    GUMBEL_BELOW_TAIL,
    TAIL_BITS,
    Stream,
    gumbel_of,
    noise_bits,
    row_keys,
    uniforms,
)
from engine.compute.sampling.processors import Filters, Support, compact, process_logits, whole_rows
from engine.compute.sampling.row_groups import in_groups
from engine.plan.step_records import NO_TOKEN, Int64, SampledRows, SamplingInputs

Rows = NDArray[np.intp]

# A small vocabulary counts as this large where rows are put in groups, for they need histograms too.
_MIN_ROW_LOGITS = 4096
# Far above float32's rounding of a gap over a temperature, far below what costs time.
_PRUNE_SLACK = 1e-3
NOT_FINITE = "the logits hold NaN or infinity"
NOTHING_LEFT = "no token is left that all of the grammar, the allowed and the banned tokens permit"


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """One draft a row and the distribution it was drawn from, for verification by `rejection` and `block`.

    `token_ids[r]` is NO_TOKEN where `row_errors` has r, and its row of `probs` means nothing then.
    """

    token_ids: list[int]  # [R]
    probs: torch.Tensor  # [R, vocab] float32
    row_errors: dict[int, str]


def select_rows(inputs: SamplingInputs, rows: NDArray[np.signedinteger]) -> SamplingInputs:
    """The inputs of some rows, which need not be in order, numbered from 0 on."""
    place = {int(row): index for index, row in enumerate(rows)} if inputs.adjustments else {}
    return SamplingInputs(
        temperature=inputs.temperature[rows],
        top_k=inputs.top_k[rows],
        top_p=inputs.top_p[rows],
        min_p=inputs.min_p[rows],
        seed=inputs.seed[rows],
        position=inputs.position[rows],
        num_logprobs=inputs.num_logprobs[rows],
        adjustments=tuple(
            replace(adjustment, row=place[adjustment.row])
            for adjustment in inputs.adjustments
            if adjustment.row in place
        ),
    )


def draw_tokens(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row, [rows], with probability proportional to `weights`; never one of weight 0.

    `weights` is float64 [rows, vocab], each row's sum above 0, `uniform` float64 [rows] inside (0, 1).
    """
    sums = weights.cumsum(dim=1)  # [rows, vocab]
    total = sums[:, -1:].contiguous()
    token_ids = torch.searchsorted(sums, uniform.unsqueeze(1) * total, right=True)
    return torch.minimum(token_ids, torch.searchsorted(sums, total)).squeeze(1)


class RowDraw(Protocol):
    """A way to draw rows, from the same probabilities and noise, that is faster than tensor operations."""

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of the greatest of each row of `logits` [n, vocab], int64 [n].

        NO_TOKEN where one is NaN or the greatest is infinite.
        """
        ...

    def draw(
        self, logits: torch.Tensor, rows: Rows, inputs: SamplingInputs, keys: torch.Tensor
    ) -> torch.Tensor:
        """A token for each of n `rows` of `logits` [.., vocab], int64 [n]; these rows' greatest is finite.

        `inputs` are theirs in turn, every temperature above 0, adjustments done already; `keys` is [n, 2].
        """
        ...


class Sampler:
    """Draws the next token of every row of one step's logits; keeps nothing between calls.

    A row's result depends on its own logits, parameters, seed and position only: never on the batch, the
    order of the rows, or which shortcuts ran. Called on the target thread.
    """

    def __init__(self, vocab_size: int, device: torch.device, row_draw: RowDraw | None = None) -> None:
        self._vocab_size = vocab_size
        self._row_draw = row_draw
        self._device = device
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)  # [vocab]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledRows:
        """One token a row; `logits` is [R, vocab] in any float type on the sampler's device, left unchanged.

        Greedy takes the lowest id among equals. A row with non-finite logits, bad adjustment data or no token
        left ends alone, in `row_errors`. Raises ValueError when the shapes do not fit.
        """
        best = self._best(logits, inputs)
        if not (inputs.temperature.any() or inputs.adjustments or (inputs.num_logprobs >= 0).any()):
            token_ids = best.tolist()
            errors = {row: NOT_FINITE for row, token_id in enumerate(token_ids) if token_id < 0}
            return SampledRows(token_ids, row_errors=errors or None)
        step = _Step(logits, inputs, (best >= 0).cpu().numpy(), best)
        step.adjust()
        self._draw(step)
        token_ids = step.token_ids.tolist()
        source = np.where(step.sound, np.arange(len(token_ids)), -1)
        logprobs = logprob_records(logits, inputs.num_logprobs, token_ids, source)
        return SampledRows(token_ids, logprobs, step.errors or None)

    @torch.inference_mode()
    def probs(self, logits: torch.Tensor, inputs: SamplingInputs) -> tuple[torch.Tensor, dict[int, str]]:
        """The distribution of each row's token under all its parameters, float64 [R, vocab], and what failed.

        It is exactly what `sample` draws from; a greedy row has all on one token. A row with an error
        is zeros. Raises ValueError when the shapes do not fit.
        """
        best = self._best(logits, inputs)
        step = _Step(logits, inputs, (best >= 0).cpu().numpy(), best)
        step.adjust()
        probs = torch.zeros(logits.shape, dtype=torch.float64, device=self._device)
        greedy = np.flatnonzero(step.sound & (inputs.temperature <= 0))
        if len(greedy):
            rows = torch.from_numpy(greedy).to(self._device)
            probs[rows, step.best(greedy)] = 1.0
        sampled = step.sound & (inputs.temperature > 0)
        filtered = self._filtered(inputs)
        for wanted, process in ((sampled & filtered, process_logits), (sampled & ~filtered, whole_rows)):
            for group in self._groups(wanted):
                filters = Filters.of_rows(inputs, group, self._vocab_size, self._device)
                support = process(step.select(group), filters)
                probs[torch.from_numpy(group).to(self._device)] = support.probs(self._vocab_size)
        return probs, step.errors

    @torch.inference_mode()
    def sample_with_probs(
        self, logits: torch.Tensor, inputs: SamplingInputs, num_committed: Int64
    ) -> DrawnDrafts:
        """Drafts for verification by `rejection` or `block`: tokens of the DRAFT stream, their probabilities.

        `num_committed` [R] counts the tokens of each row's sequence that are final where it drafts. `block`
        has looked at drafts that it then drops: drawing one again at the same position needs fresh noise, and
        every round of verification commits at least one token. Raises ValueError when the shapes do not fit.
        """
        probs, errors = self.probs(logits, inputs)
        rounded = probs.float()
        keys = row_keys(inputs.seed, num_committed, Stream.DRAFT)
        labels = torch.from_numpy(inputs.position).unsqueeze(1)  # [R, 1]
        uniform = uniforms(keys, labels).squeeze(1).to(self._device)
        token_ids = draw_tokens(rounded.double(), uniform).tolist()
        for row in errors:
            token_ids[row] = NO_TOKEN
        return DrawnDrafts(token_ids, rounded, errors)

    def _best(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """Where each row's greatest is, the first of equals; NO_TOKEN where it is not finite. [R]"""
        expected = (inputs.num_rows, self._vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits have shape {tuple(logits.shape)}, expected {expected}")
        if self._row_draw is not None:
            return self._row_draw.best(logits)
        greatest = logits.max(dim=1)  # NaN wins
        return torch.where(greatest.values.isfinite(), greatest.indices, NO_TOKEN)

    def _filtered(self, inputs: SamplingInputs) -> NDArray[np.bool_]:
        """Which rows have a top-k or a top-p that is on. [R]"""
        filtered: NDArray[np.bool_] = (inputs.top_p < 1) | (
            (inputs.top_k > 0) & (inputs.top_k < self._vocab_size)
        )
        return filtered

    def _draw(self, step: _Step) -> None:
        """Replace the greedy choice of the rows that sample."""
        inputs = step.inputs
        keys = row_keys(inputs.seed, inputs.position)  # [R, 2]
        filtered = self._filtered(inputs)
        sampled = step.sound & (inputs.temperature > 0)
        if self._row_draw is not None:
            for rows, logits, places in step.sources(sampled):
                own = select_rows(replace(inputs, adjustments=()), rows)
                step.put(rows, self._row_draw.draw(logits, places, own, keys[rows]))
            return
        for rows in self._groups(sampled & filtered):
            filters = Filters.of_rows(inputs, rows, self._vocab_size, self._device)
            support = process_logits(step.select(rows), filters)
            step.put(rows, support.draw(keys[rows].to(self._device)))
        for rows in self._groups(sampled & ~filtered):
            filters = Filters.of_rows(inputs, rows, self._vocab_size, self._device)
            row_key = keys[rows].to(self._device)
            bits = noise_bits(row_key, self._token_ids)  # [rows, vocab]
            support = prune(step.select(rows), step.best(rows), filters, bits)
            step.put(rows, support.draw(row_key))

    def _groups(self, wanted: NDArray[np.bool_]) -> Iterator[Rows]:
        rows = np.flatnonzero(wanted)
        for group in in_groups(len(rows), max(_MIN_ROW_LOGITS, self._vocab_size)):
            yield rows[group]


class _Step:
    """The working state of one call: the tokens so far, the adjusted rows, and the rows that have failed."""

    def __init__(
        self,
        logits: torch.Tensor,
        inputs: SamplingInputs,
        sound: NDArray[np.bool_],
        greedy: torch.Tensor,
    ) -> None:
        self.logits = logits  # [R, vocab]
        self.inputs = inputs
        self.sound = sound  # [R] False once a row has an error
        self.token_ids = greedy  # [R] int64
        self.errors: dict[int, str] = {int(row): NOT_FINITE for row in np.flatnonzero(~sound)}
        self._adjusted = logits.new_empty((0, logits.shape[1]), dtype=torch.float32)  # [A, vocab]
        self._slots = np.full(len(sound), -1, dtype=np.int64)  # [R] row of `_adjusted`, -1 = none

    def adjust(self) -> None:
        """Apply the adjustments to float32 copies of their rows, and make the greedy choice there again."""
        adjustments = [adjustment for adjustment in self.inputs.adjustments if self.sound[adjustment.row]]
        if not adjustments:
            return
        rows = np.array([adjustment.row for adjustment in adjustments])
        self._adjusted = self.select(rows)
        bad = apply_adjustments(self._adjusted, adjustments)
        self._slots[rows] = np.arange(len(rows))
        best = self._adjusted.max(dim=1)
        self.put(rows, best.indices)
        for slot, (row, value) in enumerate(zip(rows.tolist(), best.values.tolist(), strict=True)):
            if slot in bad:
                self._fail(row, bad[slot])
            elif value == -np.inf:
                self._fail(row, NOTHING_LEFT)
            elif not np.isfinite(value):
                self._fail(row, NOT_FINITE)

    def select(self, rows: Rows) -> torch.Tensor:
        """A float32 copy of the logits of `rows`, adjusted where asked."""  # [rows, vocab]
        logits = self.logits.index_select(0, self._index(rows)).float()
        changed = np.flatnonzero(self._slots[rows] >= 0)
        if len(changed):
            logits[self._index(changed)] = self._adjusted[self._index(self._slots[rows[changed]])]
        return logits

    def sources(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[Rows, torch.Tensor, Rows]]:
        """Where the logits of the `wanted` [R] rows lie: the rows, a tensor, and their rows in it."""
        for adjusted, logits in ((False, self.logits), (True, self._adjusted)):
            rows = np.flatnonzero(wanted & ((self._slots >= 0) == adjusted))
            if len(rows):
                yield rows, logits, self._slots[rows] if adjusted else rows

    def best(self, rows: Rows) -> torch.Tensor:
        """The greedy choice of `rows`, which have not been drawn yet."""  # [rows]
        return self.token_ids[self._index(rows)]

    def put(self, rows: Rows, token_ids: torch.Tensor) -> None:
        """Set the tokens of `rows`."""
        self.token_ids[self._index(rows)] = token_ids

    def _fail(self, row: int, reason: str) -> None:
        self.sound[row] = False
        self.errors[row] = reason

    def _index(self, rows: NDArray[np.signedinteger]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.logits.device)


def prune(logits: torch.Tensor, best: torch.Tensor, filters: Filters, bits: torch.Tensor) -> Support:
    """A small part of each row that holds the winner of the draw under `bits` for sure; min-p is applied.

    For rows that top-k and top-p leave whole. `logits` is float32 [rows, vocab] and is overwritten, `best`
    [rows] is its (finite) argmax, `bits` [rows, vocab] every token's noise bits. The likeliest token's score
    bounds the winner's from below, so the winner is near the top or has noise in the tail, as one token in 64
    has: no other needs its logarithm taken.
    """
    best = best.unsqueeze(1)
    gaps = logits.sub_(logits.gather(1, best)).abs_()  # [rows, vocab]
    reach = GUMBEL_BELOW_TAIL - gumbel_of(bits.gather(1, best)) + _PRUNE_SLACK  # [rows, 1]
    token_ids, valid = compact((bits >= TAIL_BITS) | (gaps <= (reach * filters.temperature).float()))
    scaled = gaps.gather(1, token_ids) / -filters.temperature  # [rows, width]
    return Support(token_ids, scaled.masked_fill_(~valid | (scaled < filters.log_min_p), -torch.inf))
