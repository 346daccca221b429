"""FusedLatentAttention: multi-head latent attention in eight launches or nine, in place of some thirty."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionBackend, AttentionContext, LayerCall
from engine.compute.attention.latent_kv import latent_of
from engine.compute.cuda.fused_norms import FusedNorm, eps_of
from engine.compute.cuda.fused_products import can_be_joined, is_projection, joined
from engine.compute.cuda.latent_kernels import (
    APART,
    HALVES,
    NEIGHBOURS,
    NEIGHBOURS_TO_HALVES,
    latent_kernel,
    query_rest_kernel,
)
from engine.compute.cuda.triton_pages import pages_of
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.families import Pairing, latent_pairing
from engine.compute.native.observation import Seen, observe
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import NormKind
from engine.compute.recurrent.recurrent_forward import HybridAttention
from engine.compute.runner.scratch_pass import forward_of
from engine.errors import UnsupportedModel

log = logging.getLogger("slipstream.model")

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor] | torch.Tensor  # or complex numbers

_ORDERS = {Pairing.NONE: APART, Pairing.HALVES: HALVES, Pairing.NEIGHBOURS: NEIGHBOURS}


class _Angles(NamedTuple):
    """Cosines and sines [num_tokens, any], whose numbers lie `step` apart."""

    cosines: torch.Tensor
    sines: torch.Tensor
    step: int = 1

    @classmethod
    def of(cls, rotation: Rotation | None, rows: torch.Tensor) -> _Angles:
        """As transformers gives them; any numbers where nothing is rotated."""
        if rotation is None:
            return cls(rows, rows)
        if isinstance(rotation, tuple):
            cosines, sines = (part.flatten(0, -2).contiguous() for part in rotation)
            return cls(cosines, sines)
        parts = torch.view_as_real(rotation.flatten(0, -2).contiguous())
        return cls(parts[..., 0], parts[..., 1], 2)


class FusedLatentAttention(nn.Module):
    """An attention with the weights of `original`, equal to it up to rounding; it needs a context.

    `call` is what the original asks of the attention function. The projections of one input are one product.
    The latent row of a token is normed, rotated and stored in one launch, with the norm of what queries are
    made of; queries that meet latent rows are written where attention reads them.
    """

    by_key: torch.Tensor
    by_value: torch.Tensor

    def __init__(self, original: Any, call: LayerCall) -> None:
        super().__init__()
        latent = latent_of(original)
        assert latent is not None, "only attentions that fit are asked for"
        by_key, by_value = latent.weights()  # [heads, its dim, rank]
        self.register_buffer("by_key", by_key.detach(), persistent=False)
        self.register_buffer("by_value", by_value.detach(), persistent=False)
        self.first = joined(_first(original))
        self.second = original.q_b_proj if original.q_lora_rank is not None else None
        self.output = original.o_proj
        self.query_norm = None if self.second is None else FusedNorm(original.q_a_layernorm, NormKind.ROUNDED)
        self.latent_norm = FusedNorm(original.kv_a_layernorm, NormKind.ROUNDED)
        self.rotated: int = original.qk_rope_head_dim
        self.order = _order_of(original)
        self.call = call

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if latent_pairing(original) is None or latent_of(original) is None:
            return False
        norms = [original.kv_a_layernorm]
        linears = [*_first(original), original.o_proj]
        if original.q_lora_rank is not None:
            norms.append(original.q_a_layernorm)
            linears.append(original.q_b_proj)
        return (
            all(map(is_unhooked, original.modules()))
            and all(is_projection(linear, dtype) for linear in linears)
            and can_be_joined(_first(original))
            and all(norm.weight.dtype is dtype and eps_of(norm) is not None for norm in norms)
            and original.kv_b_proj.weight.dtype is dtype
            and original.qk_rope_head_dim % 2 == 0
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`; no weights of attention."""
        if attention_mask is not None:
            raise UnsupportedModel("The model cannot be served exactly: it builds its own attention mask.")
        context: AttentionContext = options[CONTEXT_KEYWORD]
        given = self.first(hidden_states[0])
        angles = _Angles.of(None if self.order == APART else position_embeddings, given)
        queries = self._store(given, angles, context)
        if self.second is not None:
            queries = self.second(queries)
        attended = context.attend_written(self._asked(queries, angles), self.call)  # [N, heads, rank]
        values = attended.new_empty(len(attended), *self.by_value.shape[:2])
        by_value = self.by_value.transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), by_value, out=values.transpose(0, 1))
        return self.output(values.flatten(1))[None], None

    def _store(self, given: torch.Tensor, angles: _Angles, context: AttentionContext) -> torch.Tensor:
        """Store the latent rows of the step; what queries are, or are projected from, [N, any]."""
        keys = context.key_pages(self.call.layer)
        count, width = given.shape
        rank = self.by_key.shape[2]
        num_queries = width - rank - self.rotated
        norm = self.query_norm
        queries = given[:, :num_queries] if norm is None else given.new_empty(count, num_queries)
        latent_kernel[(2 * count,)](
            given,
            given if norm is None else norm.weight,
            self.latent_norm.weight,
            angles.cosines,
            angles.sines,
            queries,
            keys.pages,
            keys.slots,
            0.0 if norm is None else norm.variance_epsilon,
            self.latent_norm.variance_epsilon,
            STRIDE=width,
            QUERIES=num_queries,
            RANK=rank,
            ROTATED=self.rotated,
            ANGLES=angles.cosines.stride(0),
            STEP=angles.step,
            ORDER=self.order,
            HAS_QUERIES=norm is not None,
            PADDED_QUERIES=triton.next_power_of_2(num_queries),
            PADDED_RANK=triton.next_power_of_2(rank),
            PADDED_ROTATED=triton.next_power_of_2(self.rotated),
            BLOCK_SIZE=keys.block_size,
            PAGES=pages_of(keys.kept),
        )
        return queries

    def _asked(self, queries: torch.Tensor, angles: _Angles) -> torch.Tensor:
        """Queries as they are scored against stored rows, [N, heads, rank + rotated]."""
        heads, plain, rank = self.by_key.shape
        query = queries.new_empty(len(queries), heads, rank + self.rotated)
        by_head = queries.view(len(queries), heads, plain + self.rotated)
        torch.bmm(by_head[..., :plain].transpose(0, 1), self.by_key, out=query[..., :rank].transpose(0, 1))
        query_rest_kernel[(len(queries) * heads,)](
            queries,
            angles.cosines,
            angles.sines,
            query,
            STRIDE=queries.stride(0),
            HEADS=heads,
            PLAIN=plain,
            RANK=rank,
            ROTATED=self.rotated,
            ANGLES=angles.cosines.stride(0),
            STEP=angles.step,
            ORDER=self.order,
            PADDED_ROTATED=triton.next_power_of_2(self.rotated),
            num_warps=1,
        )
        return query


@torch.inference_mode()
def fuse_latent_attentions(loaded: LoadedModel, backend: AttentionBackend, block_size: int) -> int:
    """Replace each attention over latent rows that answers alike: how many there were.

    Raises whatever a compiler or driver does.
    """
    forward_of(loaded)  # says which store latent rows
    modules = loaded.model.named_modules()
    fitting = [name for name, module in modules if FusedLatentAttention.fits(module, loaded.dtype)]
    if not fitting:
        return 0
    observation = observe(loaded, fitting, block_size)
    step = observation.context(backend)
    context: Any = HybridAttention(step, loaded) if loaded.keeps_state else step
    count = 0
    for name in fitting:
        original: Any = loaded.model.get_submodule(name)
        place = loaded.attending.index(original.layer_idx)
        made = _equal(original, observation.seen.get(name), observation.calls.get(place), context)
        if made is None or not is_close(step.kv.keys[place], observation.kv.keys[place]):
            log.debug("%s answers otherwise when fused: it stays", name)
            continue
        loaded.model.set_submodule(name, made)
        count += 1
    return count


def _equal(
    original: Any, seen: Seen | None, call: LayerCall | None, context: AttentionContext
) -> FusedLatentAttention | None:
    """The attention fused, which leaves its rows in `context`; None unless its answer is the one seen."""
    if seen is None or call is None or not isinstance(seen.output, tuple):
        return None
    made = FusedLatentAttention(original, call._replace(layer=original.layer_idx))
    found, _ = made(*seen.args, **(seen.options | {CONTEXT_KEYWORD: context}))
    return made if is_close(found, seen.output[0]) else None


def _first(original: Any) -> list[Any]:
    """What projects the layer's input: to queries, or to what these are made of, and to the latent row."""
    query = original.q_proj if original.q_lora_rank is None else original.q_a_proj
    return [query, original.kv_a_proj_with_mqa]


def _order_of(original: Any) -> int:
    pairing = latent_pairing(original)
    assert pairing is not None, "only attentions that fit are asked for"
    if pairing is Pairing.AS_CONFIGURED:
        return NEIGHBOURS_TO_HALVES if original.config.rope_interleave else HALVES
    return _ORDERS[pairing]
