"""LayerForm: what a decoder layer made of our modules computes, read off its parts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from engine.compute.native.families import is_plain
from engine.compute.native.kernels import NO_NORM
from engine.compute.native.modules import NativeAttention, NativeMlp, NativeNorm
from engine.compute.native.records import Decoder, DecoderLayer, Norm


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a layer calls its norms, by their places; empty where it has none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""

    def __iter__(self) -> Iterator[str]:
        """Those there are."""
        return filter(None, astuple(self))


# Which norms a layer has says where they stand: no two families give other places to the same names.
NORM_NAMES = (
    NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    NormNames(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
    NormNames(before_attention="input_layernorm"),  # read by both halves
    NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
)


_NO_TABLE = -1


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What all layers of a model must have alike to be computed in one call."""

    norm_names: NormNames
    sizes: tuple[int, ...]  # of all projections
    head_dim: int
    norms_rows: bool  # as in HeadForm
    activation: int
    is_gated: bool
    residual_multiplier: float

    @classmethod
    def of(cls, layer: Any) -> LayerForm | None:
        """That of one layer; None for one that is not all ours, or does more than call its parts."""
        names = _norm_names(layer)
        if names is None or not is_plain(layer, "DecoderLayer"):
            return None
        attention, mlp = layer.self_attn, layer.mlp
        if attention.call.chunk is not None or attention.call.sinks is not None:
            return None
        linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        sizes = tuple(size for linear in linears for size in (linear.in_features, linear.out_features))
        multiplier = getattr(layer, "residual_multiplier", 1.0)
        heads = attention.head_dim, attention.form.norms_rows
        form = cls(names, sizes, *heads, mlp.activation, mlp.is_gated, multiplier)
        return None if form.is_parallel and multiplier != 1.0 else form

    @property
    def is_parallel(self) -> bool:
        """True where attention and MLP read the same: what a single norm gives."""
        return tuple(self.norm_names) == (self.norm_names.before_attention,)


def common_form(layers: Iterable[Any]) -> LayerForm | None:
    """That of each of the layers; None where they have none, or not all the same."""
    forms = {LayerForm.of(layer) for layer in layers}
    return forms.pop() if len(forms) == 1 else None


def _norm_names(layer: nn.Module) -> NormNames | None:
    """The names of a layer's norms where these, an attention and an MLP are all it has, and all are ours.

    Dropout does nothing where nobody trains.
    """
    parts = {name: type(part) for name, part in layer.named_children() if type(part) is not nn.Dropout}
    for names in NORM_NAMES:
        if parts == {"self_attn": NativeAttention, "mlp": NativeMlp} | dict.fromkeys(names, NativeNorm):
            return names
    return None


def layer_record(layer: Any, form: LayerForm, table: int) -> DecoderLayer:
    """A layer of this form as the kernels take it; `table` is that of its angles, where it has any."""
    attention, mlp, call = layer.self_attn, layer.mlp, layer.self_attn.call
    table = table if attention.is_rotated else _NO_TABLE
    return DecoderLayer(
        *(_norm_record(layer, name) for name in astuple(form.norm_names)),
        *attention.form.norm_records,
        *(linear.weights.record for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)),
        *(table, call.window or 0, call.scaling, call.softcap or 0.0),
    )


def decoder_record(base: Any, form: LayerForm, layers: ctypes.Array[DecoderLayer], rotary: int) -> Decoder:
    """A base model whose layers are of this form as the kernels take it."""
    first, attention, dim = layers[0], base.layers[0].self_attn, form.head_dim
    heads = first.output.k // dim
    kv_heads = (first.qkv.out // dim - heads) // 2
    return Decoder(
        layers,
        base.norm.weights.record,
        attention.form.record(heads, kv_heads, dim, rotary),
        *(len(layers), first.qkv.k, first.down.k, form.activation, form.is_gated, form.is_parallel),
        form.residual_multiplier,
    )


def _norm_record(layer: Any, name: str) -> Norm:
    norm: Norm = getattr(layer, name).weights.record if name else NO_NORM
    return norm
