"""Which rows of one packed pass continue which slots: every index that its layers share, made once.

Three countings of rows: the N new ones of the pass; the M that are mixed, which are those and, in front of
each sequence's own, its accepted drafts once more; the X of the convolution, with what it reads before them.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.compute.attention.kv_tensors import on_device

Index = slice | Tensor
Places = NDArray[np.int64]

# Runs of this many tokens are padded to their longest, longer ones go block by block.
_SHORT = 16


class Pieces(NamedTuple):
    """The sequences of a pass. All are [S]."""

    slots: NDArray[np.intp]
    begins: NDArray[np.bool_]  # whether its first token is the sequence's
    num_new: Places
    num_again: Places  # kept rows that are mixed once more: drafts that were accepted
    num_drafts: Places  # of the new ones: drafts, and others that the state is not to take in yet


class ScanBlock(NamedTuple):
    """Up to T consecutive mixed rows of each of n sequences; padded with a sequence's own last row.

    `valid` tells rows from padding, `taken` those that the state is to take in; None means all of them.
    """

    shape: tuple[int, int]  # n, T
    rows: Index  # [n * T] of M
    slots: Index  # [n]
    valid: Tensor | None  # [n, T]
    taken: Tensor | None  # [n, T]
    valid_places: Tensor | None  # of n * T: a device would be waited for to find them in the mask
    valid_rows: Tensor | None  # of M, in the same order

    def take(self, rows: Tensor) -> Tensor:
        """The block's share of [M, ...]: [n, T, ...]."""
        return take(rows, self.rows).view(*self.shape, *rows.shape[1:])

    def put(self, output: Tensor, mixed: Tensor) -> None:
        """Write [n, T, ...] to its rows of [M, ...]."""
        if self.valid is not None:
            assert self.valid_places is not None and self.valid_rows is not None
            output.index_copy_(0, self.valid_rows, mixed.flatten(0, 1).index_select(0, self.valid_places))
        else:
            put(output, self.rows, mixed.flatten(0, 1))


class SlotIndices(NamedTuple):
    """The indices of one pass over slots of so many rows, of which the first `conv_width` lie before a state.

    Of X, and of what `LayerSlots.extend` makes it of: rows of slots, then the N new ones.
    """

    before: Places  # rows of all slots, which come before those of the pass
    order: Places  # X of both
    mixed: Places  # M of X
    new: Places  # N of M
    kept_rows: Places  # of X, what the next pass may need
    kept_places: Places  # of all slots' rows, where that is put
    begins: Places  # of M, the first tokens of sequences
    runs: Places  # [4, S] of each sequence: see SlotStep
    joins: Places  # [2, S] likewise

    @classmethod
    def of(cls, pieces: Pieces, conv_width: int, num_kept: int) -> SlotIndices:
        """Those of a pass over slots that keep `num_kept` rows each."""
        num_mixed = pieces.num_again + pieces.num_new
        num_taken = num_mixed - pieces.num_drafts
        starts = _starts(num_mixed)  # in M
        num_before = conv_width + pieces.num_again
        before = np.repeat(pieces.slots * num_kept, num_before) + _counted(num_before)
        ends = _starts(num_before + pieces.num_new)  # in X
        order = np.empty(len(before) + int(pieces.num_new.sum()), np.int64)
        order[np.repeat(ends, num_before) + _counted(num_before)] = np.arange(len(before))
        fresh = np.repeat(ends + num_before, pieces.num_new) + _counted(pieces.num_new)
        order[fresh] = len(before) + np.arange(len(fresh))
        num_kept_now = conv_width + pieces.num_drafts
        return cls(
            before=before,
            order=order,
            mixed=np.repeat(ends + conv_width, num_mixed) + _counted(num_mixed),
            new=np.repeat(starts + pieces.num_again, pieces.num_new) + _counted(pieces.num_new),
            kept_rows=np.repeat(ends + num_taken, num_kept_now) + _counted(num_kept_now),
            kept_places=np.repeat(pieces.slots * num_kept, num_kept_now) + _counted(num_kept_now),
            begins=starts[pieces.begins],
            runs=np.stack((pieces.slots, starts, num_mixed, num_taken)),
            joins=np.stack((_starts(pieces.num_new), pieces.num_again)),
        )


class SlotStep:
    """One pass over slots of `num_kept` rows, of which the first `conv_width` lie before the state's end."""

    def __init__(self, pieces: Pieces, conv_width: int, num_kept: int, device: torch.device) -> None:
        self._device = device
        self._indices = indices = SlotIndices.of(pieces, conv_width, num_kept)
        self._slots, self._starts, self._num_mixed, self._num_taken = indices.runs
        self._blocks: dict[int, list[ScanBlock]] = {}
        self.conv_width = conv_width
        self.num_mixed = len(indices.mixed)

    # Each is made where a layer first reads it: with kernels most read none but `new`, `runs` and `joins`.

    @cached_property
    def before(self) -> Tensor | None:
        """Rows of all slots that come before the new ones; None if there are none."""
        return self._tensor(self._indices.before) if len(self._indices.before) else None

    @cached_property
    def order(self) -> Tensor | None:
        """X of those and the new ones; None if they lie so."""
        order = self._indices.order
        return None if np.array_equal(order, np.arange(len(order))) else self._tensor(order)

    @cached_property
    def mixed(self) -> Index:
        """M of X."""
        return self._index(self._indices.mixed)

    @cached_property
    def new(self) -> Index | None:
        """N of M; None if all are new."""
        new = self._indices.new
        return None if len(new) == self.num_mixed else self._index(new)

    @cached_property
    def kept_rows(self) -> Tensor:
        """Of X, what the next pass may need."""
        return self._tensor(self._indices.kept_rows)

    @cached_property
    def kept_places(self) -> Tensor:
        """Of all slots' rows, where that is put."""
        return self._tensor(self._indices.kept_places)

    @cached_property
    def begins(self) -> Tensor:
        """Of M, the first tokens of sequences."""
        return self._tensor(self._indices.begins)

    @cached_property
    def runs(self) -> Tensor:
        """Of each sequence its slot, its first row of M, how many it has, and how many its state takes in.

        int64 [4, S].
        """
        return self._tensor(self._indices.runs)

    @cached_property
    def joins(self) -> Tensor:
        """Of each sequence its first row of N, and how many kept rows are mixed before it: int64 [2, S]."""
        return self._tensor(self._indices.joins)

    def blocks(self, size: int) -> list[ScanBlock]:
        """All mixed rows, in blocks of up to `size` tokens; a sequence's in their order.

        Single tokens are together, and so are short runs, with those single ones that no state takes in.
        Blocks end with their sequences, and what a state is not to take in lies in the last one.
        """
        size = max(size, int((self._num_mixed - self._num_taken).max()) + 1)
        if size not in self._blocks:
            num, short, is_taken = self._num_mixed, min(_SHORT, size), self._num_taken > 0
            blocks = [self._block(np.flatnonzero((num == 1) & is_taken), 1, 1)]
            is_run = (num > 1) | ~is_taken
            blocks.append(self._block(np.flatnonzero(is_run & (num <= short)), short, 1))
            long = np.flatnonzero(num > short)
            for left in range(int(-(-num[long].max(initial=0) // size)), 0, -1):
                blocks.append(self._block(long[num[long] > (left - 1) * size], size, left))
            self._blocks[size] = [block for block in blocks if block is not None]
        return self._blocks[size]

    def _block(self, sequences: NDArray[np.intp], size: int, left: int) -> ScanBlock | None:
        """The block of `sequences` that is followed by `left` - 1 others of `size`."""
        if not len(sequences):
            return None
        sequences = sequences[np.argsort(self._slots[sequences])]
        stops = self._num_mixed[sequences] - (left - 1) * size
        firsts = np.maximum(stops - size, 0)
        counts = stops - firsts
        length = int(counts.max())
        places = np.arange(length)
        within = np.minimum(places, counts[:, None] - 1) + firsts[:, None]  # [n, T]
        rows = within + self._starts[sequences][:, None]
        valid = places < counts[:, None]
        taken = valid & (within < self._num_taken[sequences][:, None])
        slots = self._slots[sequences].astype(np.int64)
        return ScanBlock(
            (len(sequences), length),
            self._index(rows.ravel()),
            self._index(slots),
            None if valid.all() else on_device(valid, self._device).bool(),
            None if taken.all() else on_device(taken, self._device).bool(),
            None if valid.all() else self._tensor(np.flatnonzero(valid)),
            None if valid.all() else self._tensor(rows[valid]),
        )

    def _tensor(self, places: Places) -> Tensor:
        return on_device(places, self._device)

    def _index(self, places: Places) -> Index:
        """A slice if the places are consecutive, so that it is a view; else a tensor of them."""
        if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            return slice(int(places[0]), int(places[0]) + len(places))
        return self._tensor(places)


def take(tensor: Tensor, index: Index) -> Tensor:
    """The rows at `index`: a view for a slice, else a copy."""
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def put(tensor: Tensor, index: Index, rows: Tensor) -> None:
    """Write back what `take` gave; a slice's rows are there already if they were changed in place."""
    if isinstance(index, slice):
        if rows.data_ptr() != tensor[index].data_ptr():
            tensor[index] = rows
    else:
        tensor.index_copy_(0, index, rows)


def _starts(lengths: Places) -> Places:
    """Where each of several runs of such lengths begins."""
    return np.cumsum(lengths) - lengths


def _counted(lengths: Places) -> Places:
    """0, 1 … of each of several runs, one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(_starts(lengths), lengths)
