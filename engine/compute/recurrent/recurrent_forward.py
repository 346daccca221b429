"""One forward pass over a packed row of a model that carries state in slots, in some or all of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
from engine.compute.attention.context import KeyPages
from engine.compute.attention.kv_tensors import sent
from engine.compute.attention.latent_kv import keep_latents
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recorded_slots import RecordedSlots
from engine.compute.recurrent.slot_mixers import continuing, install_mixers
from engine.compute.recurrent.slot_states import SlotStates
from engine.compute.recurrent.slot_step import SlotStep
from engine.compute.runner.layer_taps import tap
from engine.compute.runner.packed_forward import expect_no_padding
from engine.compute.runner.pass_memory import PassMemory
from engine.compute.runner.steady_rotation import keep_rotation
from engine.plan.step_records import StepInputs


class StateContext(NamedTuple):
    """What a pass goes on from: slots, which of them, and the K/V of the layers that attend, if any do.

    `step` is called while the pass is carried out: what it reads on the device is there by then.
    """

    states: SlotStates
    step: Callable[[], SlotStep | RecordedSlots]
    attention: AttentionContext | None


class RecurrentForward:
    """Runs a loaded recurrent or hybrid model; keeps nothing between calls."""

    def __init__(self, loaded: LoadedModel, feature_layers: Sequence[int] = ()) -> None:
        register()
        if loaded.layers:
            keep_latents(loaded.model, OUR_NAMES)
            loaded.model.set_attn_implementation(ATTENTION_NAME)
            keep_rotation(loaded)
        expect_no_padding(loaded.model)
        self.loaded = loaded
        self._feature_layers = tuple(feature_layers)
        self.backend = choose_backend(
            loaded.device, loaded.row_attention, layers=loaded.layers, kept=loaded.kept_kv
        )
        self._mixers = install_mixers(loaded.model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def __call__(self, inputs: StepInputs, memory: PassMemory) -> torch.Tensor:
        """The logits of the R rows asked for, [R, vocab]. Call under inference mode.

        Moves no blocks: that is the caller's. Raises RewindError for what slots cannot do; errors of the
        model and of the device come through, and leave the slots of the pass empty.
        """
        device = self.loaded.device
        logits = self.compute(
            sent(inputs.token_ids, device),
            sent(inputs.positions, device),
            memory.begin(inputs),
            sent(inputs.logits_rows, device),
        )
        memory.commit(inputs)
        return logits

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: StateContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As a call, over what is on the device already: [N], [N], and the `rows` [R] that want logits.

        Without rows it gives the logits of every token, [N, vocab].
        """
        loaded = self.loaded
        options: dict[str, Any] = {}
        if self._keeps_rows and rows is not None:
            options["logits_to_keep"] = rows
        if context.attention is not None:
            options["position_ids"] = positions[None]
            options[CONTEXT_KEYWORD] = HybridAttention(context.attention, loaded)
        with continuing(self._mixers, context.states, context.step(), loaded.state_kernel):
            output = loaded.model(input_ids=token_ids[None], use_cache=False, **options)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows or rows is None else logits[rows]

    def keeping_features(
        self, compute: Callable[[], torch.Tensor], rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `compute`, a pass, gives, and what enters the feature layers at every token.

        The latter is [N, layers * hidden].
        """
        return tap(self.loaded.model.base_model, self._feature_layers, compute)


class _Layers(NamedTuple):
    """The K/V shapes by `layer_idx`, with empty ones for layers that do not attend."""

    layers: tuple[LayerKv, ...]


class HybridAttention:
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

    def key_pages(self, layer: int) -> KeyPages:
        """See AttentionContext."""
        return self._context.key_pages(self._places[layer])

    def attend_written(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """See AttentionContext."""
        return self._context.attend_written(query, call._replace(layer=self._places[call.layer]))
