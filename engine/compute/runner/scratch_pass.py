"""ScratchPass: a model's forward pass over memory of its own, for checks; and which pass a model has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.packed_forward import PackedForward
from engine.plan.step_records import StepInputs


def forward_of(loaded: LoadedModel) -> PackedForward | RecurrentForward:
    """The pass that runs a model like this."""
    return RecurrentForward(loaded) if loaded.keeps_state else PackedForward(loaded)


class ScratchPass:
    """Runs `forward` over fresh memory of `sizes`; K/V is `kept` in the model's dtype unless it is said.

    Sequence i of a step has slot i unless the step says otherwise.
    """

    def __init__(
        self, forward: PackedForward | RecurrentForward, sizes: MemorySizes, kept: torch.dtype | None = None
    ) -> None:
        self._forward = forward
        self._memory: StateMemory | None = None
        if isinstance(forward, RecurrentForward):
            self._memory = StateMemory(forward, sizes)
            self.kv = self._memory.kv
        else:
            self.kv = forward.make_kv(sizes.num_blocks, sizes.block_size, kept)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """The logits of the rows asked for, [R, vocab]. Call under inference mode."""
        if isinstance(self._forward, PackedForward):
            return self._forward(inputs, self.kv)
        assert self._memory is not None
        if inputs.state_slots is None:
            inputs = replace(inputs, state_slots=np.arange(len(inputs.query_lens), dtype=np.int32))
        return self._forward(inputs, self._memory)
