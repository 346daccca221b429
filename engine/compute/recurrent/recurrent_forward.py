"""One forward pass over a packed row of a model that carries state in slots, in some or all of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.compute.attention import (
    ATTENTION_NAME,
    CONTEXT_KEYWORD,
    OUR_NAMES,
    AttentionContext,
    LayerCall,
    choose_backend,
    register,
)
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.latent_kv import keep_latents
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.slot_mixers import continuing, install_mixers
from engine.compute.recurrent.slot_states import SlotStates, Snapshots
from engine.compute.runner.layer_taps import tap
from engine.plan.step_records import StepInputs


class MemorySizes(NamedTuple):
    """How much a runner keeps of how many sequences. `max_drafts` tokens of each may be cut off again."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_drafts: int = 0
    num_snapshots: int = 0
    num_host_blocks: int = 0
    num_host_states: int = 0


class SequenceMemory(NamedTuple):
    """What a pass reads and writes: paged K/V of the layers that attend, slots of those that do not.

    Passes leave `snapshots` alone.
    """

    kv: KvTensors
    states: SlotStates
    snapshots: Snapshots


class RecurrentForward:
    """Runs a loaded recurrent or hybrid model; keeps nothing between calls."""

    def __init__(self, loaded: LoadedModel) -> None:
        register()
        if loaded.layers:
            keep_latents(loaded.model, OUR_NAMES)
            loaded.model.set_attn_implementation(ATTENTION_NAME)
        self.loaded = loaded
        self.backend = choose_backend(loaded.device)
        self._mixers = install_mixers(loaded.model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def make_memory(self, sizes: MemorySizes) -> SequenceMemory:
        """Zeros of the model's shape, and snapshots of nothing."""
        loaded = self.loaded
        states = SlotStates(loaded.states, sizes.num_slots, loaded.dtype, loaded.device, sizes.max_drafts)
        return SequenceMemory(
            KvTensors(loaded.layers, sizes.num_blocks, sizes.block_size, loaded.dtype, loaded.device),
            states,
            Snapshots(states, sizes.num_snapshots),
        )

    def __call__(self, inputs: StepInputs, memory: SequenceMemory) -> torch.Tensor:
        """The logits of the R rows asked for, [R, vocab]. Call under inference mode.

        Moves no blocks: that is the caller's. Raises RewindError for what slots cannot do; errors of the
        model and of the device come through, and leave the slots of the pass empty.
        """
        device = self.loaded.device
        rows = torch.tensor(inputs.logits_rows, device=device)
        options: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        if self.loaded.layers:
            options["position_ids"] = torch.tensor(inputs.positions, device=device)[None]
            options[CONTEXT_KEYWORD] = _HybridAttention(
                AttentionContext(inputs, memory.kv, self.backend), self.loaded
            )
        step = memory.states.begin(inputs)
        with continuing(self._mixers, memory.states, step, self.loaded.state_kernel):
            output = self.loaded.model(
                input_ids=torch.tensor(inputs.token_ids, device=device)[None], use_cache=False, **options
            )
        memory.states.commit_states(inputs)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def with_features(
        self, inputs: StepInputs, memory: SequenceMemory, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits as a call gives them, and what enters `layers` at every token: [N, layers * hidden]."""
        return tap(self.loaded.model.base_model, layers, lambda: self(inputs, memory))


class _Layers(NamedTuple):
    """The K/V shapes by `layer_idx`, with empty ones for layers that do not attend."""

    layers: tuple[LayerKv, ...]


class _HybridAttention:
    """An AttentionContext whose tensors have no place for the layers that do not attend."""

    def __init__(self, context: AttentionContext, loaded: LoadedModel) -> None:
        self._context = context
        self._places = {index: place for place, index in enumerate(loaded.attending)}
        nothing = LayerKv(0, 0, 0)
        self.kv = _Layers(
            tuple(
                loaded.layers[self._places[index]] if index in self._places else nothing
                for index in range(max(loaded.attending) + 1)
            )
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """See AttentionContext."""
        return self._context.attend(query, key, value, call._replace(layer=self._places[call.layer]))
