"""NativeDecoder: all layers of a model between its embedding and its head in one call of a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, PagedRows
from engine.compute.native.families import is_plain
from engine.compute.native.kernels import NativeKernels, head_norm_records, norm_record
from engine.compute.native.modules import NativeAttention, NativeGatedMlp, NativeRmsNorm
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import INDEX, POINTER, Decoder, DecoderLayer, DecoderStep
from engine.compute.native.rotation_table import RotationTable
from engine.compute.native.scratch import kept_numbers
from engine.compute.runner.layer_taps import tap

_PARTS: dict[str, type[nn.Module]] = {
    "self_attn": NativeAttention,
    "mlp": NativeGatedMlp,
    "input_layernorm": NativeRmsNorm,
    "post_attention_layernorm": NativeRmsNorm,
}


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a model's head reads of its base model's output; transformers' own is slow to make."""

    last_hidden_state: torch.Tensor  # [1, N, hidden]
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class NativeDecoder(nn.Module):
    """Stands in for a base model whose layers consist of our modules, and gives the same bits.

    `plain` is that model. It runs the steps whose attention is not all the kernel's, and keeps the weights.
    `tapped_layers` and `tapped` are as in Tappable.
    """

    def __init__(self, kernels: NativeKernels, plain: Any) -> None:
        super().__init__()
        self.plain = plain
        self.tapped_layers: tuple[int, ...] = ()
        self.tapped: torch.Tensor | None = None
        self.embed_tokens = plain.embed_tokens  # where transformers looks for it
        self._kernels = kernels
        self._layers = (DecoderLayer * len(plain.layers))(*map(_layer_record, plain.layers))
        self._decoder = _decoder_record(plain, self._layers)
        self._rotations = RotationTable(plain.rotary_emb, plain.norm.weight)
        self._scratch = torch.empty(0, dtype=plain.norm.weight.dtype)

    @staticmethod
    def fits(base: Any) -> bool:
        """True for a base model whose every layer can be computed so."""
        if not (is_plain(base, "Model") and is_unhooked(base) and type(base.norm) is NativeRmsNorm):
            return False
        layers = base.layers
        if len(layers) != base.config.num_hidden_layers or not all(map(_is_ours, layers)):
            return False
        calls = [layer.self_attn.call for layer in layers]
        if any(call.chunk is not None or call.sinks is not None for call in calls):
            return False
        return [call.layer for call in calls] == list(range(len(layers))) and len(
            set(map(_shape, layers))
        ) == 1

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        """As `plain`'s, for one packed row [1, N] and the keyword `slipstream_context`."""
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = context.native_rows
        if rows is None:
            return self._compute_plainly(input_ids=input_ids, position_ids=position_ids, **options)
        hidden = self.embed_tokens(input_ids)  # [1, N, hidden]
        self._decode(hidden[0], position_ids[0], context, rows)
        return DecoderOutput(hidden)

    def _compute_plainly(self, **options: Any) -> Any:
        if not self.tapped_layers:
            return self.plain(**options)
        output, self.tapped = tap(self.plain, self.tapped_layers, lambda: self.plain(**options))
        return output

    def _decode(
        self, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext, rows: PagedRows
    ) -> None:
        """Turn the embedded tokens `hidden` [N, hidden] into what the head reads, in place."""
        cos, sin = self._rotations.rows(positions)
        kv, slots, n = context.kv, context.slots, len(hidden)
        keys, values = _addresses(kv.keys), _addresses(kv.values)
        attention = self._kernels.attention_record(rows, kv.keys[0], self._decoder.heads)
        taps = (INDEX * len(self.tapped_layers))(*self.tapped_layers)
        self.tapped = hidden.new_empty(n, len(taps) * hidden.shape[1])
        step = DecoderStep(
            *(tensor.data_ptr() for tensor in (hidden, cos, sin, slots)),
            *(keys, values, ctypes.pointer(attention), self._scratch_for(n).data_ptr(), n),
            *(ctypes.addressof(taps), self.tapped.data_ptr(), len(taps)),
        )
        self._kernels.decode(self._decoder, step)

    def _scratch_for(self, num_tokens: int) -> torch.Tensor:
        """Memory for so many tokens; kept, since touching fresh pages costs more than a small step."""
        needed = num_tokens * self._kernels.decoder_scratch(self._decoder)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(kept_numbers(needed), dtype=self._scratch.dtype)
        return self._scratch


def _is_ours(layer: Any) -> bool:
    """True for a layer that is made of our modules and does nothing but call them."""
    parts = {name: type(part) for name, part in layer.named_children()}
    return is_plain(layer, "DecoderLayer") and parts == _PARTS and all(map(is_unhooked, layer.modules()))


def _shape(layer: Any) -> tuple[int, ...]:
    """What all layers must have alike."""
    linears = (layer.self_attn.qkv, layer.self_attn.output, layer.mlp.gate_up, layer.mlp.down)
    return tuple(size for linear in linears for size in (linear.in_features, linear.out_features))


def _layer_record(layer: Any) -> DecoderLayer:
    attention, mlp, call = layer.self_attn, layer.mlp, layer.self_attn.call
    query_norm, key_norm = head_norm_records(attention.norms)
    return DecoderLayer(
        _norm_record(layer.input_layernorm),
        query_norm,
        key_norm,
        _norm_record(layer.post_attention_layernorm),
        *(linear.weights.record for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)),
        *(call.window or 0, call.scaling, call.softcap or 0.0),
    )


def _decoder_record(plain: Any, layers: ctypes.Array[DecoderLayer]) -> Decoder:
    first = layers[0]
    dim: int = plain.layers[0].self_attn.head_dim
    heads = first.output.k // dim
    kv_heads = (first.qkv.out // dim - heads) // 2
    return Decoder(
        layers,
        _norm_record(plain.norm),
        *(len(layers), first.qkv.k, heads, kv_heads, dim, first.down.k),
    )


def _norm_record(norm: NativeRmsNorm) -> Any:
    return norm_record(norm.weight, norm.eps)


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
