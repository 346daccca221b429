"""NativeDecoder: all layers of a model between its embedding and its head in one call of a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, PagedRows
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.native.families import is_whole
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.layer_form import LayerForm, heads_record
from engine.compute.native.modules import NativeNorm
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import INDEX, POINTER, Decoder, DecoderLayer, DecoderStep
from engine.compute.native.rotation_table import RotationTable, kind_of_layer, rotation_tables
from engine.compute.native.scratch import kept_numbers
from engine.compute.runner.layer_taps import tap


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a model's head reads of its base model's output; transformers' own is slow to make."""

    last_hidden_state: torch.Tensor  # [1, N, hidden]
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None


class NativeDecoder(nn.Module):
    """Stands in for a base model whose layers consist of our modules, and gives the same bits.

    `plain` is that model: it runs the steps whose attention is not all the kernel's, and keeps the weights.
    `kv` is what each of its layers attends to. `tapped_layers` and `tapped` are as in Tappable.
    """

    def __init__(self, kernels: NativeKernels, plain: Any, kv: Sequence[LayerKv]) -> None:
        super().__init__()
        self.plain = plain
        self.tapped_layers: tuple[int, ...] = ()
        self.tapped: torch.Tensor | None = None
        self.embed_tokens = plain.embed_tokens  # where transformers looks for it
        self._multiplier: float | None = getattr(plain, "embedding_multiplier", None)
        self._kernels = kernels
        tables = rotation_tables(plain.rotary_emb, plain.norm.weight)
        self._rotations = list(tables.values())
        self._layers = (DecoderLayer * len(plain.layers))(
            *(self._record(index, layer_kv.num_kv_heads, tables) for index, layer_kv in enumerate(kv))
        )
        hidden = plain.norm.weight.numel()
        self._decoder = Decoder(self._layers, plain.norm.weights.record, len(plain.layers), hidden)
        self._most_heads = max(layer.form.heads for layer in self._layers)
        self._largest = max(range(len(self._layers)), key=lambda index: self._layers[index].form.dim)
        self._scratch = torch.empty(0, dtype=plain.norm.weight.dtype)

    @staticmethod
    def fits(base: Any) -> bool:
        """True for a base model whose every layer can be computed so."""
        if not (is_whole(base, "Model") and is_unhooked(base) and _norm_is_ours(base)):
            return False
        layers = base.layers
        if len(layers) != base.config.num_hidden_layers:
            return False
        if not all(is_unhooked(part) for layer in layers for part in layer.modules()):
            return False
        if not all(LayerForm.of(layer) for layer in layers):
            return False
        return [layer.self_attn.call.layer for layer in layers] == list(range(len(layers)))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        """As `plain`'s, for one packed row [1, N] and the keyword `slipstream_context`."""
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = context.native_rows
        if rows is None:
            return self._compute_plainly(input_ids=input_ids, position_ids=position_ids, **options)
        hidden = self.embed_tokens(input_ids)  # [1, N, hidden]
        if self._multiplier is not None:
            hidden = hidden * self._multiplier
        layer_inputs = self._layer_inputs(input_ids, hidden)
        self._decode(hidden[0], layer_inputs, position_ids[0], context, rows)
        return DecoderOutput(hidden)

    def _layer_inputs(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """What Gemma 4 brings for each layer alone, [1, N, layers, width]; None for all else."""
        if not getattr(self.plain, "hidden_size_per_layer_input", 0):
            return None
        of_tokens = self.plain.get_per_layer_inputs(input_ids)
        inputs: torch.Tensor = self.plain.project_per_layer_inputs(embedded, of_tokens)
        return inputs.contiguous()

    def _record(self, index: int, kv_heads: int, tables: Mapping[str | None, RotationTable]) -> DecoderLayer:
        layer, kind = self.plain.layers[index], kind_of_layer(self.plain, index, tables)
        form = LayerForm.of(layer)
        assert form is not None, "only what fits is asked for"
        heads = heads_record(layer, tables[kind].width)
        return form.record(layer, heads, kv_heads, list(tables).index(kind))

    def _compute_plainly(self, **options: Any) -> Any:
        if not self.tapped_layers:
            return self.plain(**options)
        output, self.tapped = tap(self.plain, self.tapped_layers, lambda: self.plain(**options))
        return output

    def _decode(
        self,
        hidden: torch.Tensor,
        layer_inputs: torch.Tensor | None,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: PagedRows,
    ) -> None:
        """Turn the embedded tokens `hidden` [N, hidden] into what the head reads, in place."""
        angles = [table.rows(positions) for table in self._rotations]
        kv, slots, n = context.kv, context.slots, len(hidden)
        keys, values = _addresses(kv.keys), _addresses(kv.values)
        attention = self._kernels.attention_record(rows, kv.keys[self._largest], self._most_heads)
        taps = (INDEX * len(self.tapped_layers))(*self.tapped_layers)
        self.tapped = hidden.new_empty(n, len(taps) * hidden.shape[1])
        step = DecoderStep(
            hidden.data_ptr(),
            *(_addresses([cos for cos, _ in angles]), _addresses([sin for _, sin in angles])),
            *(slots.data_ptr(), keys, values, ctypes.pointer(attention)),
            *(self._scratch_for(n).data_ptr(), n),
            *(ctypes.addressof(taps), self.tapped.data_ptr(), len(taps)),
            None if layer_inputs is None else layer_inputs.data_ptr(),
        )
        self._kernels.decode(self._decoder, step)

    def _scratch_for(self, num_tokens: int) -> torch.Tensor:
        """Memory for so many tokens; kept, since touching fresh pages costs more than a small step."""
        needed = num_tokens * self._kernels.decoder_scratch(self._decoder)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(kept_numbers(needed), dtype=self._scratch.dtype)
        return self._scratch


def _norm_is_ours(base: Any) -> bool:
    return type(getattr(base, "norm", None)) is NativeNorm


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
