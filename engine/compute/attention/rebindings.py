"""The classes that compute attention themselves, and how a call of an attention function is made of it.

Attributes are those of transformers' classes, whose projections and outputs stay in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compute.attention.key_bias import KeyBias

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, each [1, heads, N, dim]


def _nothing(_layer: Any) -> None:
    return None


class Rebinding(NamedTuple):
    """How the attention of one class becomes a call of an attention function.

    The `method` of each layer of class `layers` is replaced. `read` finds the call's queries, keys and values
    in the layer and the method's arguments; `give` makes of what they attend to, [1, N, heads, dim], what the
    method returns. `scaling`, `window` and `bias` are read from the layer, as they are wanted. A model that
    `needs_mask` fails without one, though nothing reads it.
    """

    layers: str
    method: str
    read: Callable[..., Heads]
    give: Callable[..., Any]
    scaling: Callable[[Any], float]
    window: Callable[[Any], int | None] = _nothing
    bias: Callable[[Any], KeyBias | None] = _nothing
    needs_mask: bool = False


# --- classes with a method of their own for attention alone ---


def _given(_layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Heads:
    return query, key, value


def _given_transposed(_layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Heads:
    return query, key.transpose(2, 3), value


def _by_heads(_layer: Any, attended: Tensor, *_: Any) -> tuple[Tensor, None]:
    return attended.transpose(1, 2), None


def _by_heads_alone(_layer: Any, attended: Tensor, *_: Any) -> list[Tensor]:
    return [attended.transpose(1, 2)]


# --- classes where attention is in the middle of `forward` ---


def _split(width: Tensor, dim: int) -> Tensor:
    """[1, N, heads * dim] as [1, heads, N, dim]."""
    return width.view(*width.shape[:2], -1, dim).transpose(1, 2)


def _falcon_heads(layer: Any, hidden_states: Tensor, alibi: Tensor | None, *_: Any, **options: Any) -> Heads:
    query, key, value = layer._split_heads(layer.query_key_value(hidden_states))  # [1, N, heads, dim]
    if layer.new_decoder_architecture:  # there keys and values are repeated for each query head
        each = layer.num_heads // layer.num_kv_heads
        key, value = key[:, :, ::each], value[:, :, ::each]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    if alibi is None:
        query, key = (_rotated(states, options["position_embeddings"]) for states in (query, key))
    return query, key, value


def _rotated(states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """[1, heads, N, dim], turned by cosines and sines [1, N, dim] in pairs that are half of `dim` apart."""
    cos, sin = (part[:, None] for part in angles)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _falcon_bias(layer: Any) -> KeyBias | None:
    """Rounded to bfloat16 whatever the model's dtype, and scaled with the scores."""
    if not layer.config.alibi:
        return None
    return KeyBias(alibi_slopes(layer.num_heads), torch.bfloat16, layer.inv_norm_factor)


def _bloom_heads(layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Heads:
    heads: Heads = layer._reshape(layer.query_key_value(hidden_states))
    return heads


def _mpt_heads(layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Heads:
    projected = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        projected = projected.clamp(-layer.clip_qkv, layer.clip_qkv)
    query, key, value = (_split(part, layer.head_dim) for part in projected.chunk(3, dim=-1))
    return query, key, value


def _heads_apart(layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Heads:
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (_split(project(hidden_states), layer.head_dim) for project in projections)
    return query, key, value


def _differential_heads(layer: Any, hidden_states: Tensor, **options: Any) -> Heads:
    """DiffLlama's, whose heads all read both halves of the values: these lie one behind the other."""
    query, key, value = _heads_apart(layer, hidden_states)
    query, key = (_rotated(states, options["position_embeddings"]) for states in (query, key))
    return query, key, torch.cat([half.repeat(1, 2, 1, 1) for half in value.chunk(2, dim=1)], dim=-1)


def _gated_heads(layer: Any, hidden_states: Tensor, **options: Any) -> Heads:
    """Doge's, where a key's own value adds to its scores: as one more dimension of queries and keys.

    With three of zeros, so that rows stay whole words.
    """
    query, key, value = _heads_apart(layer, hidden_states)
    query, key = layer.q_norm(query), layer.k_norm(key)
    query, key = (_rotated(states, options["position_embeddings"]) for states in (query, key))
    gates = torch.exp(layer.A * F.softplus(layer.dt_proj(value.transpose(1, 2).flatten(2))))
    ones = torch.full_like(query[..., :1], 1 / layer.scaling)
    more = (F.pad(each, (0, 3)) for each in (ones, gates.transpose(1, 2)[..., None]))
    query, key = (torch.cat(pair, dim=-1) for pair in zip((query, key), more, strict=True))
    return query, key, value


def _differential_output(layer: Any, attended: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The second half of the heads taken from the first (Ye et al. 2024, differential attention)."""
    first, second = attended.chunk(2, dim=2)
    products = layer.lambda_q1 * layer.lambda_k1, layer.lambda_q2 * layer.lambda_k2
    plus, minus = (product.sum(-1, dtype=torch.float32).exp().to(attended.dtype) for product in products)
    mixed = layer.groupnorm(first - (plus - minus + layer.lambda_init) * second)
    return layer.o_proj(((1 - layer.lambda_init) * mixed).flatten(2)), None


def _projected(name: str) -> Callable[..., tuple[Tensor, None]]:
    """A `give` that puts the heads side by side through the layer's projection `name`."""

    def give(layer: Any, attended: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return getattr(layer, name)(attended.flatten(2)), None

    return give


def _bloom_output(
    layer: Any, attended: Tensor, _hidden: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return layer.dense(attended.flatten(2)) + residual, None


# --- ALiBi ---


def alibi_slopes(num_heads: int) -> Tensor:
    """A geometric series down to 2**-8, filled up from the one of twice as many heads (Press et al. 2022)."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * head / whole) for head in range(1, whole + 1)]
    slopes += [2 ** (-4 * head / whole) for head in range(1, 2 * (num_heads - whole), 2)]
    return torch.tensor(slopes)


def mpt_slopes(num_heads: int) -> Tensor:
    """As MPT orders them: of the next power of two, every second one first."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-8 * head / whole) for head in range(1, whole + 1)]
    return torch.tensor(slopes if whole == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def _of_head_dim(layer: Any) -> float:
    return float(layer.head_dim**-0.5)


_CORE = Rebinding("", "_attn", _given, _by_heads, _of_head_dim)
# By the names of transformers' model classes.
REBINDINGS = {
    "BloomForCausalLM": Rebinding(
        "BloomAttention",
        "forward",
        _bloom_heads,
        _bloom_output,
        _of_head_dim,
        bias=lambda layer: KeyBias(alibi_slopes(layer.num_heads)),
    ),
    "CodeGenForCausalLM": _CORE._replace(layers="CodeGenAttention"),
    "DiffLlamaForCausalLM": Rebinding(
        "DiffLlamaAttention", "forward", _differential_heads, _differential_output, _of_head_dim
    ),
    "DogeForCausalLM": Rebinding(
        "DogeAttention", "forward", _gated_heads, _projected("o_proj"), _of_head_dim
    ),
    "FalconForCausalLM": Rebinding(
        "FalconAttention", "forward", _falcon_heads, _projected("dense"), _of_head_dim, bias=_falcon_bias
    ),
    "GPTJForCausalLM": _CORE._replace(layers="GPTJAttention"),
    "GPTNeoForCausalLM": _CORE._replace(
        layers="GPTNeoSelfAttention",
        scaling=lambda _: 1.0,
        window=lambda layer: layer.config.window_size if layer.attention_type == "local" else None,
    ),
    "GPTNeoXJapaneseForCausalLM": _CORE._replace(
        layers="GPTNeoXJapaneseAttention", scaling=lambda layer: 1 / layer.norm_factor
    ),
    "MptForCausalLM": Rebinding(
        "MptAttention",
        "forward",
        _mpt_heads,
        _projected("out_proj"),
        lambda layer: float(layer.softmax_scale),
        bias=lambda layer: KeyBias(mpt_slopes(layer.n_heads)),
        needs_mask=True,
    ),
    "OpenAIGPTLMHeadModel": _CORE._replace(
        layers="Attention",
        read=_given_transposed,
        give=_by_heads_alone,
        scaling=lambda layer: (layer.split_size // layer.n_head) ** -0.5 if layer.scale else 1.0,
    ),
    "XGLMForCausalLM": Rebinding(
        "XGLMAttention", "forward", _heads_apart, _projected("out_proj"), _of_head_dim
    ),
}
