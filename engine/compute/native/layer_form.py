"""LayerForm: what a decoder layer made of our modules computes, read off its parts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from engine.compute.native.families import is_plain
from engine.compute.native.kernels import NO_NORM
from engine.compute.native.mixture import NativeMixture
from engine.compute.native.modules import NativeAttention, NativeMlp, NativeNorm
from engine.compute.native.records import DecoderLayer, Heads, Norm, Product


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
        if names is None or not is_plain(layer, "DecoderLayer") or layer.self_attn.call.chunk is not None:
            return None
        form = cls(names, getattr(layer, "residual_multiplier", 1.0))
        return None if form.is_parallel and form.residual_multiplier != 1.0 else form

    @property
    def is_parallel(self) -> bool:
        """True where attention and MLP read the same: what a single norm gives."""
        return tuple(self.norm_names) == (self.norm_names.before_attention,)

    def record(self, layer: Any, heads: Heads, table: int) -> DecoderLayer:
        """A layer of this form as the kernels take it; `table` is that of its angles, where it has any.

        Good for as long as the layer's weights stay where they are.
        """
        attention, call = layer.self_attn, layer.self_attn.call
        linears = attention.qkv, attention.output
        return DecoderLayer(
            *(_norm_record(layer, name) for name in astuple(self.norm_names)),
            *attention.form.norm_records,
            heads,
            *(linear.weights.record for linear in linears),
            *_mlp_records(layer.mlp),
            self.is_parallel,
            *(table if attention.is_rotated else _NO_TABLE, call.window or 0),
            None if attention.sinks is None else attention.sinks.data_ptr(),
            *(call.scaling, call.softcap or 0.0, self.residual_multiplier),
        )


def _mlp_records(mlp: NativeMlp | NativeMixture) -> tuple[Any, ...]:
    """Products, mixture, activation of the gate, and whether there is one."""
    if isinstance(mlp, NativeMixture):
        return _NO_PRODUCT, _NO_PRODUCT, ctypes.pointer(mlp.record), 0, False
    records = (linear.weights.record for linear in (mlp.gate_up, mlp.down))
    return *records, None, mlp.activation, mlp.is_gated


def heads_record(layer: Any, rotary: int) -> Heads:
    """A layer's heads as the kernels take them, where angles for `rotary` numbers of each are given."""
    attention = layer.self_attn
    dim = attention.head_dim
    heads = attention.output.in_features // dim
    kv_heads = (attention.qkv.out_features // dim - heads) // 2
    record: Heads = attention.form.record(heads, kv_heads, dim, rotary)
    return record


def _norm_names(layer: nn.Module) -> NormNames | None:
    """The names of a layer's norms where these, an attention and an MLP are all it has, and all are ours.

    Dropout does nothing where nobody trains.
    """
    parts = {name: type(part) for name, part in layer.named_children() if type(part) is not nn.Dropout}
    for names in NORM_NAMES:
        norms = dict.fromkeys(names, NativeNorm)
        for mlp in (NativeMlp, NativeMixture):
            if parts == {"self_attn": NativeAttention, "mlp": mlp} | norms:
                return names
    return None


def _norm_record(layer: Any, name: str) -> Norm:
    norm: Norm = getattr(layer, name).weights.record if name else NO_NORM
    return norm
