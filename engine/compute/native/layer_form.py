"""LayerForm: what a decoder layer made of our modules computes, read off its parts."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from engine.compute.native.experts import NativeExperts
from engine.compute.native.families import NORM_NAMES, NormNames, is_whole
from engine.compute.native.kernels import NO_NORM
from engine.compute.native.mixture import NativeMixture
from engine.compute.native.modules import (
    NativeActivation,
    NativeAttention,
    NativeLinear,
    NativeMlp,
    NativeNorm,
)
from engine.compute.native.records import DecoderLayer, Heads, Mixture, Norm, Product
from engine.compute.native.router import NativeScaledRouter

# What Gemma 4's layers may have besides: something that a step brings for one layer alone, and experts.
LAYER_INPUT: dict[str, type[nn.Module]] = {
    "per_layer_input_gate": NativeLinear,
    "act_fn": NativeActivation,
    "per_layer_projection": NativeLinear,
    "post_per_layer_input_norm": NativeNorm,
}
BESIDE: dict[str, type[nn.Module]] = {
    "router": NativeScaledRouter,
    "experts": NativeExperts,
    "pre_feedforward_layernorm_2": NativeNorm,
    "post_feedforward_layernorm_1": NativeNorm,
    "post_feedforward_layernorm_2": NativeNorm,
}

_NO_TABLE = -1
_NO_PRODUCT = Product()


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What a layer that is all ours does between its parts."""

    norm_names: NormNames
    residual_multiplier: float

    @classmethod
    def of(cls, layer: Any) -> LayerForm | None:
        """That of one layer; None for one that is not all ours, or does more than call its parts."""
        names = _norm_names(layer)
        if names is None or not is_whole(layer, "DecoderLayer") or layer.self_attn.call.chunk is not None:
            return None
        if hasattr(layer, "act_fn") and layer.act_fn.activation != layer.mlp.activation:
            return None
        form = cls(names, getattr(layer, "residual_multiplier", 1.0))
        return None if names.are_for_both and form.residual_multiplier != 1.0 else form

    def record(self, layer: Any, heads: Heads, kv_heads: int, table: int) -> DecoderLayer:
        """A layer of this form as the kernels take it; `table` is that of its angles, where it has any.

        `kv_heads` is of its pages. Good for as long as the layer's weights stay where they are.
        """
        attention, call = layer.self_attn, layer.self_attn.call
        linears = attention.qkv, attention.output
        return DecoderLayer(
            *(_norm_record(layer, name) for name in astuple(self.norm_names)),
            *attention.form.norm_records,
            *(heads, kv_heads),
            *(linear.weights.record for linear in linears),
            *_mlp_records(layer),
            self.norm_names.are_for_both,
            *(table if attention.is_rotated else _NO_TABLE, call.window or 0),
            None if attention.sinks is None else attention.sinks.data_ptr(),
            *(call.scaling, call.softcap or 0.0, self.residual_multiplier),
            *_input_records(layer),
            scalar_of(layer),
        )


def _mlp_records(layer: Any) -> tuple[Any, ...]:
    """Products, mixture and the norms about it, activation of the gate, and whether there is one."""
    mlp = layer.mlp
    if isinstance(mlp, NativeMixture):
        return _NO_PRODUCT, _NO_PRODUCT, ctypes.pointer(mlp.record), *[NO_NORM] * 3, 0, False
    mixture, names = None, ("", "", "")
    if hasattr(layer, "router"):
        mixture = ctypes.pointer(Mixture(layer.router.record, layer.experts.record))
        names = (
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        )
    records = (linear.weights.record for linear in (mlp.gate_up, mlp.down))
    return *records, mixture, *(_norm_record(layer, name) for name in names), mlp.activation, mlp.is_gated


def _input_records(layer: Any) -> tuple[Product, Product, Norm]:
    """Of what a step brings for the layer alone."""
    if not hasattr(layer, "per_layer_input_gate"):
        return _NO_PRODUCT, _NO_PRODUCT, NO_NORM
    gate, projection = layer.per_layer_input_gate, layer.per_layer_projection
    return gate.weights.record, projection.weights.record, _norm_record(layer, "post_per_layer_input_norm")


def scalar_of(layer: Any) -> float:
    """What a layer's answer is multiplied with."""
    scalar = getattr(layer, "layer_scalar", None)
    return 1.0 if scalar is None else float(scalar)


def heads_record(layer: Any, rotary: int) -> Heads:
    """A layer's heads as the kernels take them, where angles for `rotary` numbers of each are given."""
    attention = layer.self_attn
    dim, parts = attention.head_dim, attention.form.kv_parts
    heads = attention.output.in_features // dim
    kv_heads = (attention.qkv.out_features // dim - heads) // max(1, parts)
    record: Heads = attention.form.record(heads, kv_heads, dim, rotary)
    return record


def _norm_names(layer: nn.Module) -> NormNames | None:
    """The names of a layer's norms where these, an attention and an MLP are all it has, and all are ours.

    Dropout does nothing where nobody trains.
    """
    parts = {name: type(part) for name, part in layer.named_children() if type(part) is not nn.Dropout}
    for more in (LAYER_INPUT, BESIDE):
        if more.items() <= parts.items():
            parts = {name: part for name, part in parts.items() if name not in more}
    for names in NORM_NAMES:
        norms = dict.fromkeys(names, NativeNorm)
        for mlp in (NativeMlp, NativeMixture):
            if parts == {"self_attn": NativeAttention, "mlp": mlp} | norms:
                return names
    return None


def _norm_record(layer: Any, name: str) -> Norm:
    norm: Norm = getattr(layer, name).weights.record if name else NO_NORM
    return norm
