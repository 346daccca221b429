"""State slots, one a running sequence: what a model carries from token to token outside the K/V blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import RewindError, RewindFault
from engine.plan.step_records import StepInputs

_STATE_DTYPE = torch.float32  # it sums over a whole sequence

Index = slice | Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """What the recurrent layer `layer_idx` keeps for a sequence, however long that is.

    The newest `conv_width` inputs of a convolution over `conv_channels`, in the model's dtype, and a float32
    state of `shape`.
    """

    layer_idx: int
    conv_channels: int
    conv_width: int
    shape: tuple[int, ...]


def state_bytes(states: Iterable[LayerState], dtype: torch.dtype, num_slots: int = 1) -> int:
    """What `num_slots` slots cost in all layers together, for a model of `dtype`."""
    return num_slots * sum(
        state.conv_channels * state.conv_width * dtype.itemsize + prod(state.shape) * _STATE_DTYPE.itemsize
        for state in states
    )


class Run(NamedTuple):
    """Several tokens of one sequence: `rows` of the packed pass, which continue the state in `slot`."""

    rows: slice
    slot: int


@dataclass(frozen=True, slots=True)
class SlotStep:
    """Which rows of one packed pass continue which slots.

    `single_rows[i]` is the only token of the sequence in `single_slots[i]`; both are empty for none. They are
    in order of their slots, and slices where they lie in one run, so that states can be changed in place.
    """

    single_rows: Index
    single_slots: Index
    num_singles: int
    runs: tuple[Run, ...]


class SlotStates:
    """The states of up to `num_slots` sequences in every recurrent layer; every slot is empty at first.

    Used on the model's thread only. A pass changes the slots of its sequences in place, and they count as
    empty from `begin` to `commit_states`, so no sequence continues from a pass that failed half-way.
    """

    def __init__(
        self, states: Sequence[LayerState], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.device = device
        self.conv = {  # by layer_idx: [num_slots, conv_channels, conv_width]
            state.layer_idx: torch.zeros(
                num_slots, state.conv_channels, state.conv_width, dtype=dtype, device=device
            )
            for state in states
        }
        self.state = {  # by layer_idx: [num_slots, *shape]
            state.layer_idx: torch.zeros(num_slots, *state.shape, dtype=_STATE_DTYPE, device=device)
            for state in states
        }
        self._lengths = np.zeros(num_slots, np.int64)  # tokens that a slot's state has seen

    def begin(self, inputs: StepInputs) -> SlotStep:
        """Make the slots of a pass ready: those of sequences that begin are zeroed.

        Raises RewindError, and nothing has changed, for drafts, and for a sequence that goes on anywhere but
        behind the last token that its slot has seen.
        """
        slots, first = self._check(inputs)
        self._lengths[slots] = 0
        fresh = torch.tensor(slots[first == 0], device=self.device, dtype=torch.long)
        if len(fresh):
            for tensor in (*self.conv.values(), *self.state.values()):
                tensor.index_fill_(0, fresh, 0.0)
        return self._plan(inputs.query_lens, slots)

    def commit_states(self, inputs: StepInputs) -> None:
        """The pass has succeeded: its sequences may be continued from its last tokens."""
        self._lengths[inputs.state_slots] = inputs.kv_lens

    def _check(self, inputs: StepInputs) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """The slots and first positions of a pass's sequences, found sound. [S], [S]"""
        if inputs.drafts is not None:
            raise RewindError(
                RewindFault.NOT_SUPPORTED,
                "A recurrent model verifies no drafts: its state cannot be cut back.",
            )
        assert inputs.state_slots is not None, "a recurrent model needs to know its sequences' slots"
        slots = inputs.state_slots.astype(np.intp)
        first = inputs.kv_lens.astype(np.int64) - inputs.query_lens
        assert len(np.unique(slots)) == len(slots), f"two sequences share one of the slots {slots.tolist()}"
        assert 0 <= slots.min() <= slots.max() < self.num_slots, f"slots {slots.tolist()} of {self.num_slots}"
        for wrong in np.flatnonzero((first != 0) & (first != self._lengths[slots])).tolist():
            beyond = first[wrong] > self._lengths[slots[wrong]]
            raise RewindError(
                RewindFault.POSITION_BEYOND_END if beyond else RewindFault.NOT_SUPPORTED,
                f"The recurrent state in slot {slots[wrong]} has seen {self._lengths[slots[wrong]]} tokens: "
                f"it cannot go on from position {first[wrong]}, only from there or from 0.",
            )
        return slots, first

    def _plan(self, query_lens: NDArray[np.int32], slots: NDArray[np.intp]) -> SlotStep:
        starts = np.cumsum(query_lens, dtype=np.int64) - query_lens
        single = np.flatnonzero(query_lens == 1)
        single = single[np.argsort(slots[single])]
        runs = tuple(
            Run(slice(int(starts[run]), int(starts[run] + query_lens[run])), int(slots[run]))
            for run in np.flatnonzero(query_lens > 1)
        )
        return SlotStep(self._index(starts[single]), self._index(slots[single]), len(single), runs)

    def _index(self, places: NDArray[np.int64] | NDArray[np.intp]) -> Index:
        """A slice if the places are consecutive, else a tensor of them."""
        if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            return slice(int(places[0]), int(places[0]) + len(places))
        return torch.tensor(places, device=self.device, dtype=torch.long)


class LayerSlots(NamedTuple):
    """One layer's slots as one pass sees them."""

    step: SlotStep
    conv: Tensor  # [num_slots, conv_channels, conv_width]
    state: Tensor  # [num_slots, *shape]


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
