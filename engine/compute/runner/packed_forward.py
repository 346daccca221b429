"""One forward pass of a transformers model over a packed row, against given paged tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.compute.attention import (
    ATTENTION_NAME,
    CONTEXT_KEYWORD,
    OUR_NAMES,
    AttentionContext,
    choose_backend,
    register,
)
from engine.compute.attention.kv_tensors import KvTensors, sent
from engine.compute.attention.latent_kv import keep_latents
from engine.compute.attention.own_attention import attend_with
from engine.compute.attention.pass_keywords import hand_on_keywords
from engine.compute.attention.query_temperature import scale_by_position
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.places import is_unhooked
from engine.compute.runner.layer_taps import tap
from engine.compute.runner.steady_rotation import keep_rotation
from engine.compute.runner.steady_sparsity import keep_sparsity
from engine.plan.step_records import StepInputs


class PackedForward:
    """Runs a loaded model on the tokens of many sequences at once; keeps nothing between calls."""

    def __init__(self, loaded: LoadedModel, feature_layers: Sequence[int] = ()) -> None:
        register()
        hand_on_keywords(loaded.model)
        keep_latents(loaded.model, OUR_NAMES)
        attend_with(loaded.model, ATTENTION_NAME)
        scale_by_position(loaded.model)
        keep_rotation(loaded)
        keep_sparsity(loaded.model)
        expect_no_padding(loaded.model)
        self.loaded = loaded
        self._feature_layers = tuple(feature_layers)
        self.backend = choose_backend(
            loaded.device,
            loaded.row_attention,
            layers=loaded.layers,
            kept=loaded.kept_kv,
        )
        base = loaded.model.base_model
        self._decoder = base if isinstance(base, NativeDecoder) else None
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def make_kv(self, num_blocks: int, block_size: int, kept: torch.dtype | None = None) -> KvTensors:
        """Empty K/V tensors of the model's shape, `kept` in its dtype unless it is said."""
        loaded = self.loaded
        return KvTensors(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device, kept)

    def __call__(self, inputs: StepInputs, kv: KvTensors) -> torch.Tensor:
        """The logits of the R rows asked for, [R, vocab], in the model's dtype. Call under inference mode.

        Where drafts form trees, each sees its own branch only. Moves no blocks: that is the caller's. Errors
        of the model and of the device come through.
        """
        device = self.loaded.device
        return self.compute(
            sent(inputs.token_ids, device),
            sent(inputs.positions, device),
            AttentionContext(inputs, kv, self.backend),
            sent(inputs.logits_rows, device),
        )

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As a call, over what is on the device already: [N], [N], and the `rows` [R] that want logits.

        Without rows it gives the logits of every token, [N, vocab].
        """
        model = self.loaded.model
        if self._decoder is not None and is_unhooked(model):
            # What transformers' code does around layers and head is a tenth of one sequence's step.
            at_once = self._decoder.logits(token_ids, positions, context, rows)
            if at_once is not None:
                return at_once
        options = {"logits_to_keep": rows} if self._keeps_rows and rows is not None else {}
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            **options,
            **{CONTEXT_KEYWORD: context},
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows or rows is None else logits[rows]

    def with_features(self, inputs: StepInputs, kv: KvTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits as a plain call gives them, and the hidden states they were made from: [R, hidden].

        These are what the model's output embedding reads, after the last norm, in the model's dtype. With
        `feature_layers` it is what enters these, of every token: [N, layers * hidden].
        """
        rows = torch.tensor(inputs.logits_rows, device=self.loaded.device)
        return self.keeping_features(lambda: self(inputs, kv), rows)

    def keeping_features(
        self, compute: Callable[[], torch.Tensor], rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `compute`, a pass that wants the logits of `rows` (None: all), gives, and hidden states."""
        if self._feature_layers:
            return tap(self.loaded.model.base_model, self._feature_layers, compute)
        seen: list[torch.Tensor] = []
        head = self.loaded.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits = compute()
        finally:
            handle.remove()
        hidden = seen[0][0]  # [R, hidden], or [N, hidden]
        return logits, hidden if self._keeps_rows or rows is None else hidden[rows]


def expect_no_padding(model: nn.Module) -> None:
    """Have no model look among its tokens for padding, of which there is none: it would wait for a device."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _look_for_nothing


def _look_for_nothing(*_: object) -> None:
    """Nothing."""
