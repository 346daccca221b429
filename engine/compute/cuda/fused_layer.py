"""FusedLayer: a decoder layer in nine to eleven launches, in place of 36 (Llama) to 71 (Gemma 3).

The projections of one input are one matrix product, and what lies between products is one kernel each. Of
one row, as when a single sequence decodes, the products are kernels too, with what follows them. A mixture of
experts in the place of an MLP is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import triton
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, LayerCall
from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.cuda.coded_linear import TritonLinear, joined_bias, joined_linear
from engine.compute.cuda.fused_norms import FusedNorm, add, add_and_norm, eps_of, norm
from engine.compute.cuda.layer_kernels import gate_kernel
from engine.compute.cuda.row_products import added_row_product, gated_row_product, row_product
from engine.compute.loading.coded_weights import are_joinable
from engine.compute.native.families import (
    NORM_NAMES,
    Family,
    NormNames,
    family_of,
    is_read_mixture,
    is_whole,
)
from engine.compute.native.modules import activation_of, clips, mlp_names
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import Activation
from engine.errors import UnsupportedModel

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, as transformers gives them
Projection: TypeAlias = nn.Linear | TritonLinear

_JOINED = "qkv_proj"  # where a model has joined them itself
_APART = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_CHUNK = 1024  # columns that one program gates


class FusedLayer(nn.Module):
    """A layer with the weights of `original`, equal to it up to rounding. Without a context it cannot be run.

    `call` is what the original's attention asks of the attention function. The step's attention is one that
    rotates (see AttentionContext.rotate_and_attend).
    """

    def __init__(self, original: Any, call: LayerCall) -> None:
        super().__init__()
        attention = original.self_attn
        names = _norm_names(original)
        assert names is not None, "only layers that fit are asked for"
        mlp_class = _mlp_class(original.mlp, getattr(original, next(iter(names))).weight.dtype)
        assert mlp_class is not None, "only layers that fit are asked for"
        self.qkv = joined(_inputs_of(attention))
        self.output = attention.o_proj
        self.mlp: Mlp = mlp_class(original.mlp)
        # Kernels of their own for one row read plain weights. Those that read codes serve any number.
        linears = (self.qkv, self.output, *self.mlp.linears)
        self.is_plain = all(type(linear) is nn.Linear for linear in linears)
        self.input_norm = _norm_of(original, names.before_attention)
        self.attention_norm = _norm_of(original, names.after_attention)
        self.middle_norm = _norm_of(original, names.before_mlp)
        self.mlp_norm = _norm_of(original, names.after_mlp)
        self.are_for_both = names.are_for_both
        self.multiplier = float(getattr(original, "residual_multiplier", 1.0))
        self.head_norms = _head_norms(attention)
        self.family = _family(attention)
        self.is_rotated = self.family.rotates(attention)
        self.call = call

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if not is_whole(layer, "DecoderLayer") or not all(map(is_unhooked, layer.modules())):
            return False
        names = _norm_names(layer)
        if names is None or hasattr(layer, "layer_scalar"):
            return False
        attention, norms = layer.self_attn, [getattr(layer, name) for name in names]
        return (
            is_whole(attention, "Attention")
            and all(_is_norm(norm, dtype) for norm in norms)
            and _fits_heads(attention, dtype)
            and _mlp_class(layer.mlp, dtype) is not None
        )

    @staticmethod
    def rotates(layer: Any, rotation: Any, dtype: torch.dtype) -> bool:
        """True for angles that the kernel takes: in the model's own number format, or in float32.

        These only where what they turn is rounded back, once: elsewhere queries and keys would be float32.
        """
        attention = layer.self_attn
        family = _family(attention)
        if not family.rotates(attention):
            return True
        formats = {dtype, torch.float32} if family.rotates_at_once else {dtype}
        if not isinstance(rotation, tuple) or not all(part.dtype in formats for part in rotation):
            return False
        count: int = rotation[0].shape[-1] * _turned_an_angle(family)
        head_dim: int = attention.head_dim
        return count % 2 == 0 and count <= head_dim

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation | None = None, **options: Any
    ) -> torch.Tensor:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`."""
        normed, total = self.attended(hidden_states, position_embeddings, **options)
        return self.finished(normed, total, self._products(len(normed)))[None]

    def attended(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the same what the MLP is given, and what its answer is added to, both [N, hidden]."""
        if options.get("attention_mask") is not None:
            raise UnsupportedModel("The model cannot be served exactly: it builds its own attention mask.")
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = hidden_states[0].contiguous()
        turns = self._turns(position_embeddings)
        products = self._products(len(rows))
        given = self.given_to_attention(rows)
        qkv = products.project(given, self.qkv)
        attended = context.rotate_and_attend(qkv, turns, self.head_norms, self.call)
        projected = products.project(attended.flatten(1), self.output)
        if self.middle_norm is None:
            total = add(rows, projected, self.attention_norm, self.multiplier)
            return given if self.are_for_both else total, total
        total, normed = add_and_norm(rows, projected, self.middle_norm, self.attention_norm, self.multiplier)
        return normed, total

    def given_to_attention(self, rows: torch.Tensor) -> torch.Tensor:
        """What queries, keys and values are projected from, [N, hidden]."""
        return rows if self.input_norm is None else norm(rows, self.input_norm)

    def finished(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """The layer's answer from what `attended` gives, of which it may write over `total`."""
        if self.mlp_norm is None and self.multiplier == 1.0:
            return self.mlp.added(normed, total, products)
        return add(total, self.mlp.computed(normed, products), self.mlp_norm, self.multiplier)

    def _turns(self, rotation: Rotation | None) -> HeadTurns | None:
        if not self.is_rotated:
            return None
        assert rotation is not None, "there was one when the layer's answer was compared"
        cosines, sines = (part.flatten(0, -2).contiguous() for part in rotation)
        family, count = self.family, cosines.shape[-1] * _turned_an_angle(self.family)
        return HeadTurns(cosines, sines, count, family.rotates_pairs, family.has_paired_angles)

    def _products(self, num_rows: int) -> Products:
        return OF_ONE_ROW if num_rows == 1 and self.is_plain else OF_ROWS


class Mlp(Protocol):
    """What comes behind a layer's second norm; one of `_MLPS`."""

    @property
    def linears(self) -> tuple[Projection, ...]:
        """Those whose products are computed by `Products`."""
        ...

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor:
        """What it makes of rows [N, hidden]."""
        ...

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """The same, and `total`, which it may write over."""
        ...

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """What each of these products makes of one row [1, hidden], given the same whosever they are."""
        ...


class JoinedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up being one projection."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        names = mlp_names(mlp)
        activation = None if names is None else activation_of(getattr(mlp, names.activation))
        assert names is not None and activation is not None, "only MLPs that fit are asked for"
        self.gate_up = joined([getattr(mlp, name) for name in names.first])
        self.down = getattr(mlp, names.last)
        self.activation = activation

    @property
    def linears(self) -> tuple[Projection, ...]:
        """See Mlp."""
        return self.gate_up, self.down

    @staticmethod
    def fits(mlp: Any, dtype: torch.dtype) -> bool:
        """True for an MLP that can be computed; its output is still to be compared."""
        return is_whole(mlp, "MLP") and JoinedMlp.can_join(mlp, dtype)

    @staticmethod
    def can_join(mlp: Any, dtype: torch.dtype) -> bool:
        """True for what has the parts of one, whatever it does with them."""
        names = mlp_names(mlp)
        if names is None or not names.is_gated or activation_of(getattr(mlp, names.activation)) is None:
            return False
        first, down = [getattr(mlp, name) for name in names.first], getattr(mlp, names.last)
        return (
            all(_is_projection(linear, dtype) for linear in (*first, down))
            and _can_be_joined(first)
            and down.bias is None  # it is added to in place
        )

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return products.project(products.gate(normed, self.gate_up, self.activation), self.down)

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return products.add(products.gate(normed, self.gate_up, self.activation), self.down, total)

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        gated = OF_ROWS.gate(row, self.gate_up, self.activation)
        return (
            products.gate(row, self.gate_up, self.activation),
            products.project(gated, self.down),
            products.add(gated, self.down, row.clone()),
        )


class CalledMixture(nn.Module):
    """A router with its experts and whatever expert all rows share, called as the module that they are."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.mixture = mixture

    @property
    def linears(self) -> tuple[Projection, ...]:
        """See Mlp."""
        return ()

    @staticmethod
    def fits(mixture: Any, dtype: torch.dtype) -> bool:
        """True for a mixture whose code was read."""
        return is_read_mixture(mixture)

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        answer = self.mixture(normed[None])
        rows: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer  # gpt-oss tells shares, too
        return rows[0]

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return total.add_(self.computed(normed, products))

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        return ()


_MLPS = (JoinedMlp, CalledMixture)


def _mlp_class(mlp: Any, dtype: torch.dtype) -> type[JoinedMlp] | type[CalledMixture] | None:
    """What computes an MLP, or what stands in its place; None where nothing does."""
    return next((each for each in _MLPS if each.fits(mlp, dtype)), None)


class Products(NamedTuple):
    """How a layer's products with a Projection are computed, each with what follows it."""

    project: Callable[[torch.Tensor, Any], torch.Tensor]  # the linear's
    gate: Callable[[torch.Tensor, Any, Activation], torch.Tensor]  # of its first half, times its second
    add: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # and a sum, which it may write over


def _project(rows: torch.Tensor, linear: Projection) -> torch.Tensor:
    projected: torch.Tensor = linear(rows)
    return projected


def _gate(rows: torch.Tensor, linear: Projection, activation: Activation) -> torch.Tensor:
    return gate(linear(rows), activation)


def _add(rows: torch.Tensor, linear: Projection, total: torch.Tensor) -> torch.Tensor:
    if isinstance(linear, TritonLinear):
        return linear.added(rows, total)
    return total.addmm_(rows, linear.weight.t())


OF_ROWS = Products(_project, _gate, _add)
OF_ONE_ROW = Products(row_product, gated_row_product, added_row_product)  # of plain weights


def gate(gate_up: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """activation(gate) * up of [rows, 2 * width], the gates first: [rows, width], in one launch."""
    count, both = gate_up.shape
    gated = gate_up.new_empty(count, both // 2)
    chunks = triton.cdiv(both // 2, _CHUNK)
    gate_kernel[(count * chunks,)](
        gate_up, gated, WIDTH=both // 2, CHUNKS=chunks, CHUNK=_CHUNK, ACTIVATION=int(activation)
    )
    return gated


def _norm_names(layer: nn.Module) -> NormNames | None:
    """Those of a layer that has no other parts than these, an attention and an MLP.

    Dropout does nothing where nobody trains.
    """
    parts = {name for name, part in layer.named_children() if type(part) is not nn.Dropout}
    for names in NORM_NAMES:
        if parts == {"self_attn", "mlp", *names}:
            return names
    return None


def _norm_of(layer: Any, name: str) -> FusedNorm | None:
    return FusedNorm(getattr(layer, name), _family(layer).norm) if name else None


def _is_norm(norm: Any, dtype: torch.dtype) -> bool:
    """True for one of rows that the kernels take, with weights alone."""
    if not is_whole(norm, "Norm") or getattr(norm, "bias", None) is not None:
        return False
    weight = getattr(norm, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.dtype is dtype


def _fits_heads(attention: Any, dtype: torch.dtype) -> bool:
    """True for projections and norms of heads that the kernels take, and nothing beside them."""
    inputs, norms = _inputs_of(attention), _norms_of(attention)
    parts = {part for part in attention.children() if type(part) is not nn.Dropout}
    if clips(attention) or parts != {*inputs, attention.o_proj, *norms}:
        return False
    dim = attention.head_dim
    heads, rest = divmod(sum(linear.out_features for linear in inputs), dim)
    keys_and_values = heads - attention.o_proj.in_features // dim
    return (
        all(_is_projection(linear, dtype) for linear in (*inputs, attention.o_proj))
        and _can_be_joined(inputs)
        and all(_is_norm(norm, dtype) for norm in norms)
        and [len(norm.weight) for norm in norms] in ([], [dim, dim], _widths(inputs[:2]))
        and len({eps_of(norm) for norm in norms}) <= 1
        and dim % 2 == rest == keys_and_values % 2 == 0
        and (len(inputs) == 1 or inputs[1].out_features == inputs[2].out_features)
    )


def _family(module: nn.Module) -> Family:
    family = family_of(module)
    assert family is not None, "only layers that fit are asked for"
    return family


def _turned_an_angle(family: Family) -> int:
    """Numbers of a head for each angle that is given."""
    return 2 if family.has_half_angles else 1


def _inputs_of(attention: Any) -> list[Any]:
    """What projects queries, keys and values; None for one that it does not have."""
    if hasattr(attention, _JOINED):
        return [getattr(attention, _JOINED)]
    return [getattr(attention, name, None) for name in _APART]


def _norms_of(attention: Any) -> list[Any]:
    return [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]


def _widths(linears: Sequence[Any]) -> list[int]:
    return [linear.out_features for linear in linears]


def _is_projection(linear: Any, dtype: torch.dtype) -> bool:
    if isinstance(linear, TritonLinear):
        return True
    return type(linear) is nn.Linear and linear.weight.dtype is dtype


def _can_be_joined(linears: Sequence[Any]) -> bool:
    """Whether one product can take the place of all: of numbers, or of codes that are laid out alike."""
    if any(isinstance(linear, TritonLinear) for linear in linears):
        coded = [linear.coded for linear in linears if isinstance(linear, TritonLinear)]
        return len(coded) == len(linears) and are_joinable(coded)
    return True


def joined(linears: Sequence[Any]) -> Projection:
    """One projection with the outputs of all, side by side."""
    if len(linears) == 1:
        only: Projection = linears[0]
        return only
    if isinstance(linears[0], TritonLinear):
        return joined_linear(linears)
    first = linears[0]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    projection = nn.Linear(first.in_features, len(weight), bias=False, device="meta", dtype=weight.dtype)
    projection.weight = nn.Parameter(weight, requires_grad=False)
    if (bias := joined_bias(linears, weight)) is not None:
        projection.bias = nn.Parameter(bias, requires_grad=False)
    return projection


def _head_norms(attention: Any) -> HeadNorms | None:
    norms = _norms_of(attention)
    if not norms:
        return None
    query, key = (FusedNorm(norm, _family(attention).norm) for norm in norms)
    return HeadNorms(query.weight, key.weight, query.variance_epsilon)
