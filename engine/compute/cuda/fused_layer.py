"""FusedLayer: a decoder layer in nine or ten launches, in place of 32 (Cohere 2) to 72 (Gemma 4).

The projections of one input are one matrix product, and what lies between products is one kernel each. Of
one row, as when a single sequence decodes, the products are kernels too, with what follows them. A layer
that ends in a sum, and in no product that adds it, norms that for the next layer in the same launch; what
fused experts answer is summed in it, too. With a mixture of these in the place of an MLP few rows are ten
launches, as they are with experts beside it; what a step brings for one of Gemma 4's layers alone is four
more. Mixtures of other experts are called as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, LayerCall
from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.cuda.fused_mlp import (
    Attended,
    ExpertsBeside,
    GivenBeside,
    JoinedMlp,
    LayerInput,
    Mlp,
    mlp_class_of,
)
from engine.compute.cuda.fused_norms import (
    FusedNorm,
    Sum,
    add,
    eps_of,
    is_norm,
    norm,
    sum_and_norm,
)
from engine.compute.cuda.fused_products import (
    OF_ONE_ROW,
    OF_ROWS,
    Products,
    can_be_joined,
    is_projection,
    joined,
)
from engine.compute.native.families import NORM_NAMES, Family, NormNames, family_of, is_whole
from engine.compute.native.layer_form import BESIDE, LAYER_INPUT, scalar_of
from engine.compute.native.modules import clips, reads_shared, shared_as, values_are_keys
from engine.compute.native.places import is_unhooked
from engine.errors import UnsupportedModel

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, as transformers gives them

_JOINED = "qkv_proj"  # where a model has joined them itself
_APART = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_VALUE_NORM = "v_norm"


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
        mlp_class = mlp_class_of(original.mlp, getattr(original, next(iter(names))).weight.dtype)
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
        self.scalar = scalar_of(original)
        self.layer_input = LayerInput(original) if _has_input(original) else None
        self.beside = ExpertsBeside(original, self.mlp) if ExpertsBeside.are_of(original) else None
        self.head_norms = _head_norms(attention)
        self.family = _family(attention)
        self.is_rotated = self.family.rotates(attention)
        self.shared_as = shared_as(attention)
        self.call = call
        self.next_norm: FusedNorm | None = None  # of the layer that is given the answer of this one

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if not is_whole(layer, "DecoderLayer") or not all(map(is_unhooked, layer.modules())):
            return False
        names = _norm_names(layer)
        if names is None:
            return False
        attention, norms = layer.self_attn, [getattr(layer, name) for name in names]
        return (
            is_whole(attention, "Attention")
            and all(is_norm(norm, dtype) for norm in norms)
            and _fits_heads(attention, dtype)
            and (not _has_input(layer) or LayerInput.fits(layer, dtype))
            and (not ExpertsBeside.are_of(layer) or ExpertsBeside.fits(layer, dtype))
            and mlp_class_of(layer.mlp, dtype) is not None
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
        self, hidden_states: torch.Tensor, brought: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`.

        `brought` is what a step brings for some of Gemma 4's layers, each alone: [1, N, width].
        """
        normed, total, beside = self.attended(hidden_states, brought, **options)
        rows, normed_next = self.finished(normed, total, self._products(len(normed)), brought, beside)
        answer = rows[None]
        if normed_next is not None:
            options[CONTEXT_KEYWORD].hand_on(answer, self.next_norm, normed_next)
        return answer

    def attended(
        self,
        hidden_states: torch.Tensor,
        _brought: torch.Tensor | None = None,
        *,
        position_embeddings: Rotation | None = None,
        **options: Any,
    ) -> Attended:
        """Of the same what is before the MLP."""
        if options.get("attention_mask") is not None:
            raise UnsupportedModel("The model cannot be served exactly: it builds its own attention mask.")
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = hidden_states[0].contiguous()
        turns = self._turns(position_embeddings)
        products = self._products(len(rows))
        given = context.taken(hidden_states, self.input_norm)
        if given is None:
            given = self.given_to_attention(rows)
        qkv = products.project(given, self.qkv)
        attended = context.rotate_and_attend(qkv, turns, self.head_norms, self.call)
        if self.shared_as is not None:
            # A later layer that stays as it was asks for these; what it attends to lies in the pages.
            options["shared_kv_states"][self.shared_as] = (qkv.new_empty(1, 1, 0, 0),) * 2
        projected = products.project(attended.flatten(1), self.output)
        if self.middle_norm is None:
            total = add(rows, projected, self.attention_norm, self.multiplier)
            return Attended(given if self.are_for_both else total, total)
        of = Sum(rows, projected, self.attention_norm, self.multiplier)
        if self.beside is not None:
            return self.beside.middle(of, self.middle_norm)
        total, normed = sum_and_norm(of, self.middle_norm)
        return Attended(normed, total)

    def given_to_attention(self, rows: torch.Tensor) -> torch.Tensor:
        """What queries, keys and values are projected from, [N, hidden]."""
        return rows if self.input_norm is None else norm(rows, self.input_norm)

    def finished(
        self,
        normed: torch.Tensor,
        total: torch.Tensor,
        products: Products,
        brought: torch.Tensor | None = None,
        beside: GivenBeside | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's answer from what `attended` gives, of which it may write over `total`.

        Beside it what the next layer norms it to, where that one's norm is known.
        """
        if self.layer_input is None:
            answer = self._transformed(normed, total, products, self.scalar, beside)
        else:
            assert brought is not None, "there was some when the layer's answer was compared"
            rows = self._transformed(normed, total, products, 1.0, beside)
            rows = rows.computed()[0] if isinstance(rows, Sum) else rows
            answer = self.layer_input.sum_with(rows, brought[0], self.scalar)
        if not isinstance(answer, Sum):
            return answer, None
        return answer.computed(self.next_norm)

    @property
    def ends_in_sum(self) -> bool:
        """Whether its answer can be normed in the launch that it is computed by."""
        return self.layer_input is not None or self._mlp_that_adds(self.scalar) is None

    def _mlp_that_adds(self, factor: float) -> JoinedMlp | None:
        """Its MLP, where that one's last product adds what it answers."""
        if not isinstance(self.mlp, JoinedMlp) or self.mlp_norm is not None or factor != 1.0:
            return None
        return self.mlp if self.multiplier == 1.0 or self.is_plain else None

    def _transformed(
        self,
        normed: torch.Tensor,
        total: torch.Tensor,
        products: Products,
        factor: float,
        given: GivenBeside | None,
    ) -> torch.Tensor | Sum:
        mlp = self._mlp_that_adds(factor)
        if mlp is not None:
            return mlp.added(normed, total, products, self.multiplier)
        if self.beside is not None:
            assert self.mlp_norm is not None, "it is one of the norms of a layer that has experts there"
            both = self.beside.sum_with(total, self.mlp, normed, products, self.mlp_norm, given)
            return both._replace(multiplier=self.multiplier, factor=factor)
        answer = self.mlp.computed(normed, products)
        return Sum(total, answer, self.mlp_norm, self.multiplier, factor)

    def _turns(self, rotation: Rotation | None) -> HeadTurns | None:
        if not self.is_rotated:
            return None
        assert rotation is not None, "there was one when the layer's answer was compared"
        cosines, sines = (part.flatten(0, -2).contiguous() for part in rotation)
        family, count = self.family, cosines.shape[-1] * _turned_an_angle(self.family)
        return HeadTurns(cosines, sines, count, family.rotates_pairs, family.has_paired_angles)

    def _products(self, num_rows: int) -> Products:
        return OF_ONE_ROW if num_rows == 1 and self.is_plain else OF_ROWS


def _norm_names(layer: nn.Module) -> NormNames | None:
    """Those of a layer that has no other parts than these, an attention and an MLP.

    Dropout does nothing where nobody trains.
    """
    parts = {name for name, part in layer.named_children() if type(part) is not nn.Dropout}
    if _has_input(layer):
        parts -= LAYER_INPUT.keys()
    if ExpertsBeside.are_of(layer):
        parts -= BESIDE.keys()
    for names in NORM_NAMES:
        if parts == {"self_attn", "mlp", *names}:
            return names
    return None


def _has_input(layer: nn.Module) -> bool:
    return all(hasattr(layer, name) for name in LAYER_INPUT)


def _norm_of(layer: Any, name: str) -> FusedNorm | None:
    return FusedNorm(getattr(layer, name), _family(layer).norm) if name else None


def _fits_heads(attention: Any, dtype: torch.dtype) -> bool:
    """True for projections and norms of heads that the kernels take, and nothing beside them."""
    inputs, norms = _inputs_of(attention), _norms_of(attention)
    parts = {part for part in attention.children() if type(part) is not nn.Dropout}
    of_values = getattr(attention, _VALUE_NORM, None)
    if clips(attention) or parts != {*inputs, attention.o_proj, *norms, *filter(None, [of_values])}:
        return False
    dim = attention.head_dim
    heads, rest = divmod(sum(linear.out_features for linear in inputs), dim)
    keys_and_values = heads - attention.o_proj.in_features // dim
    return (
        all(is_projection(linear, dtype) for linear in (*inputs, attention.o_proj))
        and can_be_joined(inputs)
        and all(is_norm(norm, dtype) for norm in norms)
        and _are_of_heads(norms, inputs, dim)
        and (of_values is None or _only_divides(of_values))
        and len({eps_of(norm) for norm in (*norms, of_values) if norm is not None}) <= 1
        and dim % 2 == rest == keys_and_values % 2 == 0
        and (len(inputs) == 1 or inputs[1].out_features == inputs[2].out_features)
    )


def _only_divides(norm: Any) -> bool:
    return is_whole(norm, "Norm") and getattr(norm, "weight", None) is None


def _are_of_heads(norms: Sequence[Any], inputs: Sequence[Any], dim: int) -> bool:
    """True for norms of single heads, of queries alone where there is nothing else, or of all heads."""
    widths = [len(norm.weight) for norm in norms]
    if len(inputs) == len(_APART) and widths == [linear.out_features for linear in inputs[:2]]:
        return True
    return widths in ([], [dim, dim]) or (len(inputs) == 1 and widths == [dim])


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
    projections = [getattr(attention, name, None) for name in _APART]
    if reads_shared(attention):
        return projections[:1]
    if values_are_keys(attention):
        return [*projections[:2], projections[1]]  # keys twice: a few weights more, and no kernel of its own
    return projections


def _norms_of(attention: Any) -> list[Any]:
    return [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]


def _head_norms(attention: Any) -> HeadNorms | None:
    norms = _norms_of(attention)
    if not norms:
        return None
    query, key = (FusedNorm(norm, _family(attention).norm) for norm in (norms[0], norms[-1]))
    return HeadNorms(query.weight, key.weight, query.variance_epsilon, hasattr(attention, _VALUE_NORM))
