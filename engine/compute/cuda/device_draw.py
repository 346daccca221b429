"""Drawing that never waits for the device: what `Sampler` draws, by operations of fixed shapes only.

`Sampler` works on small parts of each row, and to know how small it must ask the device; on a CPU that pays.
Here every row is worked on whole. Gaps, masses and noise are the same numbers, so the tokens are the same:
an equal score falls to the lower id, among filtered tokens to the likelier one first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling.noise import gumbel_of, noise_bits, row_keys
from engine.compute.sampling.processors import Filters, masses, whole_rows
from engine.compute.sampling.row_groups import in_groups
from engine.plan.step_records import NO_TOKEN, Int32, Int64, SamplingInputs

_WIDTHS = {"temperature": 1, "log_min_p": 2, "keys": 2, "top_k": 2, "top_p": 2}  # in words of 32 bits
_PLAIN = ("temperature", "log_min_p", "keys")


class DrawColumns(NamedTuple):
    """What places of a tensor of logits are drawn by; a temperature that is 0 or no number is greedy."""

    temperature: torch.Tensor  # float32 [n, 1]
    log_min_p: torch.Tensor  # float64 [n, 1], -inf = off
    keys: torch.Tensor  # int32 [n, 2]

    @classmethod
    def of(cls, words: Mapping[str, torch.Tensor]) -> DrawColumns:
        """Over the words that `column_words` packed, wherever they were sent: views, not copies."""
        return cls(
            words["temperature"].view(torch.float32),
            words["log_min_p"].view(torch.float64),
            words["keys"],
        )


PlainDraw: TypeAlias = Callable[[torch.Tensor, DrawColumns], torch.Tensor]
FilteredDraw: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Filters, torch.Tensor], torch.Tensor]


class DeviceDraws(NamedTuple):
    """Who draws the rows of a step: those drawn whole or greedily, and those that top-k or top-p filters.

    See `draw_plain` and `draw_filtered`, whose tokens any others give too.
    """

    plain: PlainDraw
    filtered: FilteredDraw


class FilteredRows(NamedTuple):
    """Some rows that top-k or top-p filters; `rows` of the step, in the order of the words."""

    rows: NDArray[np.intp]  # [n]
    words: dict[str, Int32]  # each [n, words]

    @staticmethod
    def filters(words: Mapping[str, torch.Tensor]) -> Filters:
        """The filters over the words as they were sent."""
        return Filters(
            words["temperature"].view(torch.float32),
            words["top_k"].view(torch.float64),
            words["top_p"].view(torch.float64),
            words["log_min_p"].view(torch.float64),
            any_top_k=True,
            any_top_p_alone=True,
        )


def column_shapes(num_places: int) -> dict[str, tuple[int, int]]:
    """The words of DrawColumns for as many places."""
    return {name: (num_places, _WIDTHS[name]) for name in _PLAIN}


def column_words(inputs: SamplingInputs, places: Int64, num_places: int) -> dict[str, Int32]:
    """The words of DrawColumns, row r at `places[r]`; the places between mean greedy.

    Where each place has a row, they are in the order of the places.
    """
    columns = {
        "temperature": _words(inputs.temperature),
        "log_min_p": _words(_log(inputs.min_p)),
        "keys": row_keys(inputs.seed, inputs.position).numpy(),
    }
    if len(places) == num_places:
        return columns
    words = {}
    for name, column in columns.items():
        words[name] = np.full((num_places, _WIDTHS[name]), -1, np.int32)  # as a float that is NaN
        words[name][places] = column
    return words


def filtered_rows(
    inputs: SamplingInputs, vocab_size: int, left_out: Collection[int] = ()
) -> FilteredRows | None:
    """The sampled rows that have a top-k or a top-p that is on, without those `left_out`; None for none."""
    has_top_k = (inputs.top_k > 0) & (inputs.top_k < vocab_size)
    wanted = (inputs.temperature > 0) & (has_top_k | (inputs.top_p < 1))
    wanted[list(left_out)] = False
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return None
    top_k = np.where(has_top_k[rows], inputs.top_k[rows].astype(np.float64), np.inf)
    top_p = np.where(inputs.top_p[rows] < 1, inputs.top_p[rows].astype(np.float64), np.inf)
    words = {
        "temperature": _words(inputs.temperature[rows]),
        "log_min_p": _words(_log(inputs.min_p[rows])),
        "keys": row_keys(inputs.seed[rows], inputs.position[rows]).numpy(),
        "top_k": _words(top_k),
        "top_p": _words(top_p),
    }
    return FilteredRows(rows, words)


def draw_plain(logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """A token for each place, int64 [n]: greedy or drawn from the whole row; NO_TOKEN where it is not finite.

    `logits` is [n, vocab] in any float type and is left as it is.
    """
    groups = in_groups(len(logits), logits.shape[1])
    return torch.cat(
        [_draw_whole(logits[group], DrawColumns(*(column[group] for column in columns))) for group in groups]
    )


def _draw_whole(logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """`draw_plain` of rows that fit into memory at once."""
    best = logits.max(dim=1)  # NaN wins
    is_greedy = ~(columns.temperature > 0)  # [n, 1]
    temperature = columns.temperature.masked_fill(is_greedy, 1.0)
    plain = Filters(temperature, columns.log_min_p, columns.log_min_p, columns.log_min_p, False, False)
    support = whole_rows(logits.to(torch.float32, copy=True), plain)
    drawn = torch.where(is_greedy.squeeze(1), best.indices, support.draw(columns.keys))
    return drawn.masked_fill_(~best.values.isfinite(), NO_TOKEN)


def draw_filtered(
    logits: torch.Tensor, places: torch.Tensor, filters: Filters, keys: torch.Tensor
) -> torch.Tensor:
    """A token for each of the rows at `places`, int64 [n], from what `process_logits` would keep.

    NO_TOKEN where the row is not finite. `logits` is [places, vocab] in any float type and is left as it is;
    `places` is int64 [n], `keys` int32 [n, 2], and every temperature is above 0.
    """
    return torch.cat(
        [
            _draw_sorted(logits.index_select(0, places[group]), filters.of_group(group), keys[group])
            for group in in_groups(len(places), logits.shape[1])
        ]
    )


TORCH_DRAWS = DeviceDraws(draw_plain, draw_filtered)


def _draw_sorted(logits: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """`draw_filtered` of all rows of `logits` [n, vocab], which fit into memory at once.

    A sort stands for the histograms: it needs no answer from the device either.
    """
    best = logits.amax(dim=1, keepdim=True)  # [n, 1]; NaN wins
    gaps = logits.float() - best.float()
    gaps, token_ids = gaps.abs_().sort(dim=1, stable=True)  # so equal ones stay in the order of their ids
    mass = masses(gaps, filters)  # float64 [n, vocab]
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = rank < filters.top_k
    mass *= kept
    before = mass.cumsum(dim=1) - mass
    kept &= (before < filters.top_p * mass.sum(dim=1, keepdim=True)) | (rank == 0)
    scaled = gaps.div_(-filters.temperature)
    kept &= scaled >= filters.log_min_p
    scores = scaled.masked_fill_(~kept, -torch.inf).double() + gumbel_of(noise_bits(keys, token_ids))
    drawn = token_ids.gather(1, scores.argmax(dim=1, keepdim=True))
    return drawn.masked_fill_(~best.isfinite(), NO_TOKEN).squeeze(1)


def _log(min_p: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.log(min_p.astype(np.float64))
    return logs


def _words(column: NDArray[np.float32] | NDArray[np.float64]) -> Int32:
    """The same bits as words, [n, 1] or [n, 2]."""
    words = np.ascontiguousarray(column).view(np.int32)
    return words.reshape(len(column), column.itemsize // words.itemsize)
