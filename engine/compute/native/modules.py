"""Stand-ins for modules of transformers' models, each equal to its original up to rounding.

They keep packed weights in place of the original's. Any leading shape is taken as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, LayerCall
from engine.compute.native.block_panels import BlockPanels, joined
from engine.compute.native.families import Family, family_of, is_whole
from engine.compute.native.kernels import (
    MAX_HEAD_DIM,
    PANEL,
    VECTOR,
    HeadForm,
    NativeKernels,
    NormWeights,
)
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import Activation, NormKind
from engine.compute.native.rotation_table import in_halves
from engine.compute.native.scratch import MAX_GROUP
from engine.errors import UnsupportedModel

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class NativeLinear(nn.Module):
    """One or more projections of the same input, side by side; some may be of this kind already."""

    in_features: int
    out_features: int

    def __init__(self, kernels: NativeKernels, *linears: nn.Linear | NativeLinear) -> None:
        super().__init__()
        self.kernels = kernels
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.weights = _joined_weights(kernels, linears)

    @classmethod
    def of(cls, kernels: NativeKernels, weights: PackedWeights) -> NativeLinear:
        """One with weights that are packed."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.kernels, made.weights = kernels, weights
        made.in_features, made.out_features = weights.in_features, weights.out
        return made

    @staticmethod
    def fits(linear: nn.Module, dtype: torch.dtype) -> bool:
        """True for a plain projection that can be packed."""
        return type(linear) is nn.Linear and NativeKernels.packs(linear.weight, dtype)

    @staticmethod
    def joins(linear: nn.Module, dtype: torch.dtype) -> bool:
        """True for one that may stand beside others, packed or not."""
        if isinstance(linear, NativeLinear):
            return linear.kernels.dtype is dtype and linear.out_features % PANEL == 0
        return NativeLinear.fits(linear, dtype)

    @property
    def weight(self) -> torch.Tensor:
        """No numbers, of the dtype and on the device that some models' code asks of it."""
        return torch.empty(0, dtype=self.kernels.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.kernels.linear(rows, self.weights).view(*x.shape[:-1], self.out_features)


class NativeEmbedding(nn.Module):
    """Rows of weights in blocks; `scale` is what the model multiplies them with, if anything."""

    def __init__(self, kernels: NativeKernels, weights: PackedWeights, scale: float | None) -> None:
        super().__init__()
        self._kernels = kernels
        self.weights = weights
        self._scale = None if scale is None else torch.tensor(scale).to(kernels.dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., hidden]."""
        rows = self._kernels.read_rows(self.weights, token_ids.flatten()).view(*token_ids.shape, -1)
        return rows if self._scale is None else rows * self._scale


def _joined_weights(kernels: NativeKernels, linears: Sequence[nn.Linear | NativeLinear]) -> PackedWeights:
    """Packed together; those that are packed in blocks are not copied."""
    bias = _joined_bias(linears, kernels.dtype)
    if not any(isinstance(linear, NativeLinear) for linear in linears):
        weights = [linear.weight.detach() for linear in linears if isinstance(linear, nn.Linear)]
        return kernels.pack(weights[0] if len(weights) == 1 else torch.cat(weights), bias)
    parts: list[BlockPanels] = []
    for linear in linears:
        if isinstance(linear, NativeLinear):
            parts += linear.weights.parts
        else:
            parts.append(kernels.pack_plain(linear.weight.detach()))
    return joined(parts, bias)


class NativeNorm(nn.Module):
    """A norm of rows of `width`, as the original's family computes it."""

    def __init__(self, kernels: NativeKernels, norm: nn.Module, width: int) -> None:
        super().__init__()
        self._kernels = kernels
        self.weights = _norm_weights(norm, width, kernels.dtype)
        self.weight = self.weights.weight

    @staticmethod
    def fits(norm: nn.Module, dtype: torch.dtype) -> bool:
        """True for one that can be computed, if its rows are; its output is still to be compared."""
        if not (is_whole(norm, "Norm") or type(norm) is nn.LayerNorm) or not isinstance(_eps(norm), float):
            return False
        weight = getattr(norm, "weight", None)
        if weight is None:
            return not getattr(norm, "with_scale", True)
        return (
            isinstance(weight, torch.Tensor)
            and _is_norm_weight(norm, weight, dtype)
            and NativeNorm.takes(weight.numel())
        )

    @staticmethod
    def takes(width: int) -> bool:
        """True for rows that can be normed: a norm without weights does not say how wide its rows are."""
        return width % VECTOR == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.normalize(rows, self.weights).view(x.shape)


# By the classes of torch and transformers, or the functions of torch.
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "GELUActivation": Activation.GELU,
    "ReLUSquaredActivation": Activation.RELU_SQUARED,
}


def activation_of(given: Any) -> Activation | None:
    """What a model calls as its activation; None for one that the kernels do not know."""
    return _ACTIVATIONS.get(getattr(given, "__name__", type(given).__name__))


class NativeActivation(nn.Module):
    """An activation that no product feeds."""

    def __init__(self, kernels: NativeKernels, activation: Activation) -> None:
        super().__init__()
        self._kernels = kernels
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same, for a multiple of 16."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.activate(rows, self.activation, is_gated=False).view(x.shape)


class NativeMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).

    Gate and up are one projection, gate first.
    """

    def __init__(self, kernels: NativeKernels, mlp: Any) -> None:
        super().__init__()
        names = mlp_names(mlp)
        assert names is not None, "only MLPs that fit are asked for"
        self._kernels = kernels
        self.gate_up = NativeLinear(kernels, *(getattr(mlp, name) for name in names.first))
        self.down = NativeLinear(kernels, getattr(mlp, names.last))
        self.is_gated = names.is_gated
        activation = activation_of(getattr(mlp, names.activation))
        assert activation is not None, "only MLPs that fit are asked for"
        self.activation = activation

    @staticmethod
    def fits(mlp: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        names = mlp_names(mlp)
        if names is None or not is_whole(mlp, "MLP"):
            return False
        if activation_of(getattr(mlp, names.activation)) is None:
            return False
        linears = _linears(mlp, (*names.first, names.last), dtype)
        if not linears:
            return False
        sizes = [linear.out_features for linear in linears[:-1]]
        return len(set(sizes)) == 1 and sum(sizes) % (2 * PANEL if names.is_gated else PANEL) == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        rows = x.reshape(-1, x.shape[-1])
        act = self._kernels.activate(self.gate_up(rows), self.activation, is_gated=self.is_gated)
        down: torch.Tensor = self.down(act)
        return down.view(x.shape)


class MlpNames(NamedTuple):
    """What an MLP calls its projections and its activation."""

    first: tuple[str, ...]
    last: str
    activation: str
    is_gated: bool = True


_MLP_NAMES = (
    MlpNames(("gate_proj", "up_proj"), "down_proj", "act_fn"),
    MlpNames(("gate_up_proj",), "down_proj", "activation_fn"),
    MlpNames(("c_fc",), "c_proj", "act", is_gated=False),
)


def mlp_names(mlp: Any) -> MlpNames | None:
    """Those that an MLP has, if it has no other parts."""
    parts = {name for name, _ in mlp.named_children()}
    return next((each for each in _MLP_NAMES if parts == {*each.first, each.last, each.activation}), None)


_JOINED, _APART = ("qkv_proj",), ("q_proj", "k_proj", "v_proj")
_OUTPUT = "o_proj"
# What norms an attention may have: none, those of queries and keys, of values too, or of queries alone.
_HEAD_NORMS = ((), ("q_norm", "k_norm"), ("q_norm", "k_norm", "v_norm"), ("q_norm",))


class NativeAttention(nn.Module):
    """Rotary self-attention over the paged K/V of the step's context. Without a context it cannot be run.

    `call` is what the original asks of the attention function: scale, window and soft cap.
    """

    def __init__(self, kernels: NativeKernels, original: Any, call: LayerCall) -> None:
        super().__init__()
        self._kernels = kernels
        self.qkv = NativeLinear(kernels, *(getattr(original, name) for name in _qkv_names(original)))
        self.output = NativeLinear(kernels, getattr(original, _OUTPUT))
        self.form = _head_form(original, kernels.dtype)
        self.head_dim: int = original.head_dim
        self._family = _family(original)
        self.is_rotated = self._family.rotates(original)
        self._shared_as = shared_as(original)
        self.call = call
        self.sinks = None if call.sinks is None else call.sinks.detach().float().contiguous()

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if not is_whole(original, "Attention") or clips(original):
            return False
        names = (*_qkv_names(original), _OUTPUT)
        norms = {name for name, _ in original.named_children()} - set(names)
        dim = getattr(original, "head_dim", 0)
        if not isinstance(dim, int) or not 0 < dim <= MAX_HEAD_DIM or dim % PANEL:
            return False
        return (
            _has_heads(_linears(original, names, dtype), dim, _kv_parts(original))
            and any(norms == set(each) and _has_norms(original, each, dtype) for each in _HEAD_NORMS)
            and isinstance(getattr(original, "layer_idx", None), int)
        )

    @staticmethod
    def rotates(original: Any, rotation: Any) -> bool:
        """True for angles that our kernel takes: of whole heads, or of a multiple of 32 in front."""
        if not isinstance(rotation, tuple):
            return False
        sizes = {part.shape[-1] for part in in_halves(rotation, _family(original))}
        return all(0 < size <= original.head_dim and size % (2 * VECTOR) == 0 for size in sizes)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`."""
        if options.get("attention_mask") is not None:
            raise UnsupportedModel("The model cannot be served exactly: it builds its own attention mask.")
        context: AttentionContext = options[CONTEXT_KEYWORD]
        call = self.call
        pages = context.kv.keys[call.layer], context.kv.values[call.layer]
        rotation = None
        if self.is_rotated:
            cos, sin = (part.reshape(-1, part.shape[-1]) for part in position_embeddings)
            rotation = in_halves((cos, sin), self._family)
        qkv = self.qkv(hidden_states[0])
        query = self._kernels.rotate_and_write(qkv, rotation, self.form, pages, context.slots)
        if self._shared_as is not None:
            # A later layer that stays as it was asks for these; what it attends to lies in the pages.
            options["shared_kv_states"][self._shared_as] = (query.new_empty(1, 1, 0, 0),) * 2
        attended = context.attend_written(query, call)  # [N, heads, dim]
        return self.output(attended.flatten(1))[None], None


def last_projection(original: Any) -> str | None:
    """What an attention or MLP calls the projection that its output comes from; None for other modules."""
    names = mlp_names(original)
    if names is not None:
        return names.last
    return _OUTPUT if hasattr(original, _OUTPUT) else None


def shared_as(original: Any) -> str | None:
    """By which name an attention tells later layers of its keys and values; None for one that does not."""
    return original.layer_type if getattr(original, "store_full_length_kv", False) else None


def values_are_keys(original: Any) -> bool:
    """True for an attention whose values are its keys before they are normed and rotated."""
    return bool(getattr(original, "use_alternative_attention", False))


def reads_shared(original: Any) -> bool:
    """True for one that projects queries alone: keys and values are another layer's."""
    return bool(getattr(original, "is_kv_shared_layer", False))


def clips(original: Any) -> bool:
    """True for an attention of OLMoE's that limits what it attends with, as no published one does."""
    return getattr(getattr(original, "config", None), "clip_qkv", None) is not None


def _has_norms(original: Any, names: Sequence[str], dtype: torch.dtype) -> bool:
    """True where these norms are of single heads, or those of queries and keys of all heads of a token."""
    norms = [getattr(original, name) for name in names]
    if not all(NativeNorm.fits(norm, dtype) for norm in norms):
        return False
    dim = original.head_dim
    widths = [_norm_weights(norm, dim, dtype).weight.numel() for norm in norms]
    if widths == [dim] * len(names):
        return True
    return len(names) == 2 and widths == [original.q_proj.out_features, original.k_proj.out_features]


def _family(original: nn.Module) -> Family:
    family = family_of(original)
    assert family is not None, "only attentions that fit are asked for"
    return family


def _kv_parts(original: Any) -> int:
    """As HeadForm has it: some of Gemma 4's layers project less than keys and values."""
    if reads_shared(original):
        return 0
    return 1 if values_are_keys(original) else 2


def _qkv_names(original: nn.Module) -> tuple[str, ...]:
    return _JOINED if hasattr(original, _JOINED[0]) else _APART[: 1 + _kv_parts(original)]


def _has_heads(linears: Sequence[nn.Linear | NativeLinear], dim: int, kv_parts: int) -> bool:
    """True where a first few projections give queries and parts of KV heads that the last one can be of."""
    if not linears:
        return False
    *firsts, last = linears
    sizes = [linear.out_features for linear in firsts]
    heads, odd = divmod(last.in_features, dim)
    if not kv_parts:
        return not odd and sizes == [last.in_features]
    both, odd_too = divmod(sum(sizes) - last.in_features, kv_parts * dim)
    if odd or odd_too or not 0 < both <= heads <= MAX_GROUP * both:
        return False
    return len(sizes) == 1 or sizes == [heads * dim, *[both * dim] * kv_parts]


_LINEARS = (nn.Linear, NativeLinear)


def _linears(parent: nn.Module, names: Sequence[str], dtype: torch.dtype) -> list[nn.Linear | NativeLinear]:
    """The children of these names if all of them can be packed, else none."""
    found = [child for name in names if isinstance(child := getattr(parent, name, None), _LINEARS)]
    whole = len(found) == len(names) and all(NativeLinear.joins(each, dtype) for each in found)
    return found if whole else []


def _joined_bias(linears: Sequence[nn.Linear | NativeLinear], dtype: torch.dtype) -> torch.Tensor | None:
    biases = [linear.weights.bias if isinstance(linear, NativeLinear) else linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    whole = [
        torch.zeros(linear.out_features, dtype=dtype) if bias is None else bias.detach()
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(whole)


def _norm_weights(norm: Any, width: int, dtype: torch.dtype) -> NormWeights:
    """Those of a norm; one that has none divides its rows, of `width`, and that is all."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    weight = torch.ones(width, dtype=dtype) if weight is None else weight.detach().to(dtype)
    return NormWeights(weight, _eps(norm), _norm_kind(norm), None if bias is None else bias.detach())


def _norm_kind(norm: nn.Module) -> NormKind:
    family = family_of(norm)
    return NormKind.CENTRED if family is None else family.norm  # None is torch's own


def _is_norm_weight(norm: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for a weight of `dtype`, or of float32 whose numbers it holds where that makes no difference."""
    if weight.dtype is dtype:
        return True
    if weight.dtype is not torch.float32 or _norm_kind(norm) is not NormKind.AT_ONCE:
        return False
    return weight.is_meta or torch.equal(weight.to(dtype).float(), weight)


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _head_form(original: Any, dtype: torch.dtype) -> HeadForm:
    family, dim = _family(original), original.head_dim
    query_norm, key_norm, value_norm = (
        None if norm is None else _norm_weights(norm, dim, dtype)
        for norm in (getattr(original, name, None) for name in ("q_norm", "k_norm", "v_norm"))
    )
    return HeadForm(
        query_norm,
        key_norm,
        value_norm,
        norms_rows=query_norm is not None and query_norm.weight.numel() != dim,
        in_pairs=family.rotates_pairs,
        at_once=family.rotates_at_once,
        kv_parts=_kv_parts(original),
    )
