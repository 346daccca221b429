"""FusedLayer: a decoder layer of Llama's kind in ten launches, in place of some forty.

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
from engine.compute.attention.context import HeadNorms
from engine.compute.cuda.coded_linear import TritonLinear, joined_bias, joined_linear
from engine.compute.cuda.layer_kernels import gate_kernel, norm_kernel
from engine.compute.cuda.row_products import added_row_product, gated_row_product, row_product
from engine.compute.loading.coded_weights import are_joinable
from engine.compute.native.families import is_read_mixture, is_whole
from engine.compute.native.places import is_unhooked
from engine.errors import UnsupportedModel

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Projection: TypeAlias = nn.Linear | TritonLinear

_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")  # torch's, and transformers' own
_CHUNK = 1024  # columns that one program gates
_NARROW = 1024  # columns up to which four warps norm a row as fast as eight


class _Norm(Protocol):
    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def variance_epsilon(self) -> float: ...


class FusedLayer(nn.Module):
    """A layer with the weights of `original`, equal to it up to rounding. Without a context it cannot be run.

    `call` is what the original's attention asks of the attention function. The step's attention is one that
    rotates (see AttentionContext.rotate_and_attend).
    """

    def __init__(self, original: Any, call: LayerCall) -> None:
        super().__init__()
        attention, dtype = original.self_attn, original.input_layernorm.weight.dtype
        mlp_class = _mlp_class(original.mlp, dtype)
        assert mlp_class is not None, "only layers that fit are asked for"
        self.qkv = joined(_inputs_of(attention, _ATTENTION[:3]))
        self.output = attention.o_proj
        self.mlp: Mlp = mlp_class(original.mlp)
        # Kernels of their own for one row read plain weights. Those that read codes serve any number.
        linears = (self.qkv, self.output, *self.mlp.linears)
        self.is_plain = all(type(linear) is nn.Linear for linear in linears)
        self.input_norm = original.input_layernorm
        self.middle_norm = original.post_attention_layernorm
        self.head_norms = _head_norms(attention)
        self.head_dim: int = attention.head_dim
        self.call = call

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if not is_whole(layer, "DecoderLayer") or not all(map(is_unhooked, layer.modules())):
            return False
        if {name for name, _ in layer.named_children()} != _PARTS:
            return False
        attention = layer.self_attn
        head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms]
        return (
            is_whole(attention, "Attention")
            and all(_is_projection(linear, dtype) for linear in _inputs_of(attention, _ATTENTION))
            and _can_be_joined(_inputs_of(attention, _ATTENTION[:3]))
            and all(is_whole(norm, "RMSNorm") and norm.weight.dtype is dtype for norm in norms)
            and all(len(norm.weight) == attention.head_dim for norm in head_norms)  # OLMoE's are of all heads
            and attention.head_dim % 2 == 0
            and attention.k_proj.out_features == attention.v_proj.out_features
            and _mlp_class(layer.mlp, dtype) is not None
        )

    @staticmethod
    def rotates(layer: Any, rotation: Any, dtype: torch.dtype) -> bool:
        """True for angles that the kernel takes: of whole heads, in the model's own number format."""
        return isinstance(rotation, tuple) and all(
            part.dtype is dtype and part.shape[-1] == layer.self_attn.head_dim for part in rotation
        )

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, **options: Any
    ) -> torch.Tensor:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`."""
        normed, total = self.attended(hidden_states, position_embeddings, **options)
        return self.mlp.added(normed, total, self._products(len(normed)))[None]

    def attended(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the same what the MLP is given, and what its answer is added to, both [N, hidden]."""
        if options.get("attention_mask") is not None:
            raise UnsupportedModel("The model cannot be served exactly: it builds its own attention mask.")
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = hidden_states[0].contiguous()
        cosines, sines = (part.reshape(-1, self.head_dim).contiguous() for part in position_embeddings)
        products = self._products(len(rows))
        qkv = products.project(norm(rows, self.input_norm), self.qkv)
        attended = context.rotate_and_attend(qkv, (cosines, sines), self.head_norms, self.call)
        projected = products.project(attended.flatten(1), self.output)
        total, normed = add_and_norm(rows, projected, self.middle_norm)
        return normed, total

    def _products(self, num_rows: int) -> Products:
        return OF_ONE_ROW if num_rows == 1 and self.is_plain else OF_ROWS


class Mlp(Protocol):
    """What comes behind a layer's second norm; one of `_MLPS`."""

    @property
    def linears(self) -> tuple[Projection, ...]:
        """Those whose products are computed by `Products`."""
        ...

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """What it makes of rows [N, hidden], and `total`, which it may write over."""
        ...

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """What each of these products makes of one row [1, hidden], given the same whosever they are."""
        ...


class JoinedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up being one projection."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up = joined(_inputs_of(mlp, _MLP[:2]))
        self.down = mlp.down_proj

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
        return (
            type(getattr(mlp, "act_fn", None)).__name__ in _SILU
            and all(_is_projection(linear, dtype) for linear in _inputs_of(mlp, _MLP))
            and _can_be_joined(_inputs_of(mlp, _MLP[:2]))
            and mlp.down_proj.bias is None  # it is added to in place
        )

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return products.add(products.gate(normed, self.gate_up), self.down, total)

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        gated = OF_ROWS.gate(row, self.gate_up)
        return products.gate(row, self.gate_up), products.add(gated, self.down, row.clone())


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
        """True for a mixture whose code was read, and which gives nothing beside what comes of its rows."""
        return is_read_mixture(mixture) and not hasattr(mixture, "router")

    def added(self, normed: torch.Tensor, total: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return total.add_(self.mixture(normed[None])[0])

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
    gate: Callable[[torch.Tensor, Any], torch.Tensor]  # silu(first half) * second half of it
    add: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # and a sum, which it may write over


def _project(rows: torch.Tensor, linear: Projection) -> torch.Tensor:
    projected: torch.Tensor = linear(rows)
    return projected


def _gate(rows: torch.Tensor, linear: Projection) -> torch.Tensor:
    return gate(linear(rows))


def _add(rows: torch.Tensor, linear: Projection, total: torch.Tensor) -> torch.Tensor:
    if isinstance(linear, TritonLinear):
        return linear.added(rows, total)
    return total.addmm_(rows, linear.weight.t())


OF_ROWS = Products(_project, _gate, _add)
OF_ONE_ROW = Products(row_product, gated_row_product, added_row_product)  # of plain weights


def norm(rows: torch.Tensor, module: _Norm) -> torch.Tensor:
    """The root-mean-square norm of [rows, width], in one launch."""
    normed = torch.empty_like(rows)
    _launch_norm(rows, None, module, rows, normed)
    return normed


def add_and_norm(rows: torch.Tensor, added: torch.Tensor, module: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both [rows, width], and its norm, in one launch."""
    total, normed = torch.empty_like(rows), torch.empty_like(rows)
    _launch_norm(rows, added, module, total, normed)
    return total, normed


def _launch_norm(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    module: _Norm,
    total: torch.Tensor,
    normed: torch.Tensor,
) -> None:
    count, width = rows.shape
    norm_kernel[(count,)](
        rows,
        rows if added is None else added,
        module.weight,
        total,
        normed,
        module.variance_epsilon,
        HAS_ADDED=added is not None,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=8 if width > _NARROW else 4,
    )


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * width], the gates first: [rows, width], in one launch."""
    count, both = gate_up.shape
    gated = gate_up.new_empty(count, both // 2)
    chunks = triton.cdiv(both // 2, _CHUNK)
    gate_kernel[(count * chunks,)](gate_up, gated, WIDTH=both // 2, CHUNKS=chunks, CHUNK=_CHUNK)
    return gated


def _inputs_of(module: Any, names: Sequence[str]) -> list[Any]:
    """The projections of one input."""
    return [getattr(module, name, None) for name in names]


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
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    return HeadNorms(query.weight.detach(), key.weight.detach(), query.variance_epsilon)
