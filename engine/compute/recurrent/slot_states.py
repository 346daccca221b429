"""State slots, one a running sequence: what a model carries from token to token outside the K/V blocks.

A state that has taken a token in cannot let it go, so drafts are kept out of it: a slot's state ends before
the first draft of the last step, and the rows of those drafts, which are small, are kept beside it. The next
step mixes those that were accepted once more, in front of its own tokens. A prompt's last token is kept out
of it in the same way where other sequences are to begin before that token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.compute.attention.kv_tensors import on_device
from engine.compute.recurrent.recorded_slots import RecordedSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.state_kernel import StateKernel
from engine.errors import RewindError, RewindFault
from engine.plan.step_records import StateCopy, StepInputs

LEAST_KEPT_ROWS = 1  # beside a state, where nothing drafts: a prompt's last token, before which forks begin
_STATE_DTYPE = torch.float32  # it sums over a whole sequence


@dataclass(frozen=True, slots=True)
class LayerState:
    """What the recurrent layer `layer_idx` keeps for a sequence, however long that is.

    A token's row is the `row_width` values that the later ones need of it, in the model's dtype: the inputs
    of a convolution that reads `conv_width` tokens back, and gates. The float32 state has `shape`.
    """

    layer_idx: int
    row_width: int
    conv_width: int
    shape: tuple[int, ...]


def state_bytes(
    states: Iterable[LayerState], dtype: torch.dtype, num_slots: int = 1, max_drafts: int = 0
) -> int:
    """What `num_slots` slots cost in all layers of a model of `dtype`, with so many drafts each."""
    return num_slots * sum(
        state.row_width * (state.conv_width + max_drafts) * dtype.itemsize
        + prod(state.shape) * _STATE_DTYPE.itemsize
        for state in states
    )


class Snapshots:
    """Copies of states, of up to `num` sequences or positions, without the rows of drafts behind them.

    Used on the model's thread only. What a snapshot that nothing was saved in holds is not defined.
    """

    def __init__(self, slots: SlotStates, num: int) -> None:
        self._slots = slots
        self._rows = {  # by layer_idx: [num, conv_width, row_width]
            layer_idx: rows.new_empty(num, slots.conv_width, *rows.shape[2:])
            for layer_idx, rows in slots.rows.items()
        }
        self._state = {  # by layer_idx: [num, *shape]
            layer_idx: state.new_empty(num, *state.shape[1:]) for layer_idx, state in slots.state.items()
        }
        self._lengths = np.zeros(num, np.int64)  # tokens that each has taken in

    def save(self, copies: Sequence[StateCopy]) -> None:
        """Copy what slots have behind the last committed pass, its drafts left out, into snapshots."""
        for source, target in copies:
            for layer_idx, rows in self._rows.items():
                rows[target] = self._slots.rows[layer_idx][source, : self._slots.conv_width]
                self._state[layer_idx][target] = self._slots.state[layer_idx][source]
            self._lengths[target] = self._slots.length(source)

    def restore(self, copies: Sequence[StateCopy]) -> None:
        """Copy snapshots into slots, whose sequences go on behind what was saved."""
        for source, target in copies:
            for layer_idx, rows in self._rows.items():
                self._slots.rows[layer_idx][target, : self._slots.conv_width] = rows[source]
                self._slots.state[layer_idx][target] = self._state[layer_idx][source]
            self._slots.set_length(target, int(self._lengths[source]))


class HostStates:
    """Room in host memory for the states of `num` sequences, with the rows of the drafts behind them.

    Memory is taken when a place is first reserved. Used on the model's thread only.
    """

    def __init__(self, slots: SlotStates, num: int) -> None:
        self.num = num
        self._slots = slots
        self._kept: dict[int, _HostState] = {}

    @property
    def each_bytes(self) -> int:
        """What a state takes."""
        return sum(tensor[0].nbytes for tensor in self._slots.tensors)

    def reserve(self, places: Iterable[int]) -> None:
        """Take the memory of these places, where that has not been done."""
        for place in places:
            assert place < self.num, f"host state {place} is none of the {self.num}"
            if place not in self._kept:
                self._kept[place] = _HostState([self._room(tensor[0]) for tensor in self._slots.tensors])

    def save(self, copies: Sequence[StateCopy]) -> None:
        """Copy all that is in slots into places here, which are reserved."""
        for slot, place in copies:
            kept = self._kept[place]
            for target, source in zip(kept.tensors, self._slots.tensors, strict=True):
                target.copy_(source[slot], non_blocking=True)
            kept.num_tokens, kept.num_drafts = self._slots.counts(slot)

    def restore(self, copies: Sequence[StateCopy]) -> None:
        """Copy what `save` put into places back into slots, whose sequences go on wherever they could."""
        for place, slot in copies:
            kept = self._kept[place]
            for source, target in zip(kept.tensors, self._slots.tensors, strict=True):
                target[slot].copy_(source, non_blocking=True)
            self._slots.set_length(slot, kept.num_tokens, kept.num_drafts)

    def _room(self, like: Tensor) -> Tensor:
        if like.device.type == "cuda":
            try:
                return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            except RuntimeError:  # a limit on locked memory: slower, still right
                pass
        return torch.empty(like.shape, dtype=like.dtype)


@dataclass(slots=True)
class _HostState:
    """One sequence's tensors, and what its slot said of them."""

    tensors: list[Tensor]
    num_tokens: int = 0
    num_drafts: int = 0


class SlotStates:
    """The states of up to `num_slots` sequences in every recurrent layer; every slot is empty at first.

    Used on the model's thread only. A pass changes the slots of its sequences in place, and they count as
    empty from `begin` to `commit_states`, so no sequence continues from a pass that failed half-way. A
    sequence may be cut back by as many tokens as its last step had drafts, `max_drafts` at most.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_drafts = max_drafts
        self.device = device
        self.conv_width = max((state.conv_width for state in states), default=0)
        self.num_kept = self.conv_width + max_drafts
        # By layer_idx: [num_slots + 1, num_kept, row_width], from `conv_width` tokens before the state's end
        # on; the last slot is nobody's: see RecordedSlots.
        self.rows = {
            state.layer_idx: torch.zeros(
                num_slots + 1, self.num_kept, state.row_width, dtype=dtype, device=device
            )
            for state in states
        }
        self.state = {  # by layer_idx: [num_slots, *shape]
            state.layer_idx: torch.zeros(num_slots, *state.shape, dtype=_STATE_DTYPE, device=device)
            for state in states
        }
        self._lengths = np.zeros(num_slots, np.int64)  # tokens that a slot's state has taken in
        self._kept = np.zeros(num_slots, np.int64)  # rows of drafts behind them

    def length(self, slot: int) -> int:
        """The tokens that this slot's state has taken in."""
        return int(self._lengths[slot])

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, each [num_slots or one more, ...]."""
        return [*self.rows.values(), *self.state.values()]

    def counts(self, slot: int) -> tuple[int, int]:
        """The tokens that this slot's state has taken in, and the rows of drafts that it keeps."""
        return int(self._lengths[slot]), int(self._kept[slot])

    def set_length(self, slot: int, num_tokens: int, num_drafts: int = 0) -> None:
        """The slot has been filled with the state behind so many tokens, and the rows of so many drafts."""
        self._lengths[slot], self._kept[slot] = num_tokens, num_drafts

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Have sequences in other slots go on wherever those in the sources can, drafts included."""
        for source, target in copies:
            for tensor in self.tensors:
                tensor[target] = tensor[source]
            self._lengths[target], self._kept[target] = self._lengths[source], self._kept[source]

    def begin(self, inputs: StepInputs) -> SlotStep:
        """Make the slots of a pass ready: those of sequences that begin are zeroed.

        Raises RewindError, and nothing has changed, for trees of drafts, for more drafts than are kept, and
        for a sequence that goes on anywhere but behind the last token that its slot has seen or at a draft.
        """
        return SlotStep(self.begin_pieces(inputs), self.conv_width, self.num_kept, self.device)

    def begin_pieces(self, inputs: StepInputs) -> Pieces:
        """As `begin`; what the pass computes of which sequences."""
        pieces = self._check(inputs)
        self._lengths[pieces.slots] = self._kept[pieces.slots] = 0
        if pieces.begins.any():
            fresh = on_device(pieces.slots[pieces.begins], self.device)
            for tensor in self.tensors:
                tensor.index_fill_(0, fresh, 0.0)
        return pieces

    def num_again(self, inputs: StepInputs) -> int:
        """How many drafts, accepted by now, a pass of these inputs has its states take in."""
        assert inputs.state_slots is not None, "a recurrent model needs to know its sequences' slots"
        first = inputs.kv_lens.astype(np.int64) - inputs.query_lens
        return int(np.where(first == 0, 0, first - self._lengths[inputs.state_slots]).sum())

    def commit_states(self, inputs: StepInputs) -> None:
        """The pass has succeeded: its sequences may go on behind their newest tokens, or behind any draft."""
        slots, num_outside = inputs.state_slots, _num_outside(inputs)
        self._lengths[slots] = inputs.kv_lens - num_outside
        self._kept[slots] = num_outside

    def _check(self, inputs: StepInputs) -> Pieces:
        """What a pass computes of which sequences, found sound."""
        if inputs.drafts is not None and inputs.drafts.parents is not None:
            raise RewindError(
                RewindFault.NOT_SUPPORTED, "A recurrent model verifies chains of drafts, and no trees."
            )
        num_outside = _num_outside(inputs)
        if num_outside.max(initial=0) > self.max_drafts:
            raise RewindError(
                RewindFault.NOT_SUPPORTED,
                f"A slot keeps the rows of {self.max_drafts} drafts: {num_outside.max()} cannot be verified.",
            )
        assert inputs.state_slots is not None, "a recurrent model needs to know its sequences' slots"
        slots = inputs.state_slots.astype(np.intp)
        first = inputs.kv_lens.astype(np.int64) - inputs.query_lens
        assert len(np.unique(slots)) == len(slots), f"two sequences share one of the slots {slots.tolist()}"
        assert 0 <= slots.min() <= slots.max() < self.num_slots, f"slots {slots.tolist()} of {self.num_slots}"
        num_again = np.where(first == 0, 0, first - self._lengths[slots])
        for wrong in np.flatnonzero((num_again < 0) | (num_again > self._kept[slots])).tolist():
            raise RewindError(
                RewindFault.NOT_SUPPORTED if num_again[wrong] < 0 else RewindFault.POSITION_BEYOND_END,
                f"The recurrent state in slot {slots[wrong]} has seen {self._lengths[slots[wrong]]} tokens "
                f"and keeps {self._kept[slots[wrong]]} drafts: it cannot go on from position {first[wrong]}.",
            )
        return Pieces(slots, first == 0, inputs.query_lens.astype(np.int64), num_again, num_outside)


def _num_outside(inputs: StepInputs) -> NDArray[np.int64]:
    """The last tokens of each sequence of a step that its state is not to take in yet. [S]"""
    num_outside = np.zeros(len(inputs.query_lens), np.int64)
    if inputs.drafts is not None:
        num_outside[inputs.drafts.sequence] = inputs.drafts.num_drafts
    num_outside[list(inputs.held_back)] += 1
    return num_outside


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """One layer's slots as one pass sees them, and what computes in place of torch, if anything does."""

    step: SlotStep | RecordedSlots
    rows: Tensor  # [num_slots + 1, conv_width + max_drafts, row_width]
    state: Tensor  # [num_slots, *shape]
    kernel: StateKernel | None = None

    def extend(self, rows: Tensor) -> Tensor:
        """The rows of a pass, [N, row_width], with what slots have before each sequence: [X, row_width]."""
        step = self.step
        if step.before is not None:
            rows = torch.cat([self.rows.flatten(0, 1).index_select(0, step.before), rows])
        return rows if step.order is None else rows.index_select(0, step.order)

    def keep(self, extended: Tensor) -> None:
        """Put into the slots what the next pass may need of `extended`."""
        if len(self.step.kept_places):
            self.rows.flatten(0, 1).index_copy_(
                0, self.step.kept_places, extended.index_select(0, self.step.kept_rows)
            )
