"""StateMemory: the PassMemory of a model that carries state: slots, and the K/V of layers that attend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from engine.compute.attention import AttentionContext
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.recurrent.recorded_slots import RecordedSlots, slot_arrays, slot_words
from engine.compute.recurrent.recurrent_forward import RecurrentForward, StateContext
from engine.compute.recurrent.slot_states import SlotStates, Snapshots
from engine.compute.recurrent.slot_step import SlotIndices
from engine.compute.runner.pass_memory import PassRoom
from engine.plan.step_records import Int32, StepInputs


class MemorySizes(NamedTuple):
    """How much a runner keeps of how many sequences. `max_drafts` tokens of each may be cut off again."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_drafts: int = 0
    num_snapshots: int = 0
    num_host_blocks: int = 0
    num_host_states: int = 0


class StateMemory:
    """Zeros of the model's shape at first, and snapshots of nothing; see PassMemory."""

    def __init__(self, forward: RecurrentForward, sizes: MemorySizes) -> None:
        loaded = forward.loaded
        self._forward = forward
        self.kv = KvTensors(loaded.layers, sizes.num_blocks, sizes.block_size, loaded.dtype, loaded.device)
        self.states = SlotStates(
            loaded.states, sizes.num_slots, loaded.dtype, loaded.device, sizes.max_drafts
        )
        self.snapshots = Snapshots(self.states, sizes.num_snapshots)

    def begin(self, inputs: StepInputs) -> StateContext:
        """See PassMemory. Raises RewindError for what slots cannot do."""
        attention = AttentionContext(inputs, self.kv, self._forward.backend) if self.kv.layers else None
        step = self.states.begin(inputs)
        return StateContext(self.states, lambda: step, attention)

    def commit(self, inputs: StepInputs) -> None:
        """See PassMemory. States that are to be kept are saved."""
        self.states.commit_states(inputs)
        self.snapshots.save(inputs.moves.state_saves)

    def scratch(self) -> StateMemory:
        """See PassMemory."""
        return StateMemory(
            self._forward, MemorySizes(1, self.kv.block_size, 1, max_drafts=self.states.max_drafts)
        )

    def num_again(self, inputs: StepInputs) -> int:
        """See PassMemory."""
        return self.states.num_again(inputs)

    def words(self, room: PassRoom) -> dict[str, tuple[int, ...]]:
        """See PassMemory."""
        return slot_words(self.states.conv_width, room)

    def fill(self, inputs: StepInputs, room: PassRoom) -> Mapping[str, Int32]:
        """See PassMemory. Raises as `begin` does."""
        states = self.states
        indices = SlotIndices.of(states.begin_pieces(inputs), states.conv_width, states.num_kept)
        return slot_arrays(indices, room.num_sequences * states.conv_width + room.num_again)

    def recorded(
        self, attention: AttentionContext, arrays: Mapping[str, torch.Tensor], room: PassRoom
    ) -> StateContext:
        """See PassMemory."""
        states = self.states
        step = partial(RecordedSlots, arrays, states.conv_width, states.num_kept, states.num_slots, room)
        return StateContext(states, step, attention if self.kv.layers else None)
