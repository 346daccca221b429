"""Our attention as transformers calls it: what it passes is honoured or refused by name, never ignored."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from engine.compute.attention.backend import LayerCall
from engine.compute.attention.context import AttentionContext
from engine.compute.attention.latent_kv import latent_of
from engine.errors import UnsupportedModel

ATTENTION_NAME = "slipstream"
CONTEXT_KEYWORD = "slipstream_context"
PROBE_NAME = "slipstream-probe"
OUR_NAMES = frozenset({ATTENTION_NAME, PROBE_NAME})  # of functions that know of latent keys

# What a model may tell its attention function without changing the result: our context knows the positions,
# and the rest is about what the model returns.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


def register() -> None:
    """Make `attn_implementation="slipstream"` known to transformers; calling it again changes nothing.

    No mask function goes with it on purpose: transformers then builds no mask at all, where with one it would
    first search the positions for packed sequences and wait for the device to answer. A mask that a model
    builds by itself arrives here and is refused.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over one packed row, in the shapes that transformers' attention functions take and give.

    `query` is [1, num_heads, N, dim], `key` and `value` [1, num_kv_heads, N, dim], the result
    [1, N, num_heads, value_dim]. Needs the keyword `slipstream_context`. Raises UnsupportedModel for anything
    that would change the result and is not served.
    """
    latent = latent_of(module)
    query = query if latent is None else latent.ask(query)
    context, call = _read_options(module, query, attention_mask, options)
    output = context.attend(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        call,
    )
    attended = output.unsqueeze(0) if latent is None else latent.expand(output.unsqueeze(0))
    return attended.contiguous(), None  # some models view it in other shapes


def _read_options(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[AttentionContext, LayerCall]:
    context = options.pop(CONTEXT_KEYWORD, None)
    if context is None:
        raise _refusal(module, "it does not pass keywords on to the attention function")
    scaling = options.pop("scaling", None)
    window = options.pop("sliding_window", None)
    softcap = options.pop("softcap", None)
    sinks = options.pop("s_aux", None)
    bias = options.pop("key_bias", None)
    if options.pop("dropout", 0.0):
        raise _refusal(module, "its attention drops out")
    if options.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise _refusal(module, "it attends to later tokens (is_causal)")
    if attention_mask is not None:
        raise _refusal(module, "it builds its own attention mask (attention_mask)")
    for name, value in options.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise _refusal(module, f"its attention takes {name!r}, which is not served")
    layer = _layer_index(module, context)
    if window != context.kv.layers[layer].window:
        raise _refusal(
            module,
            f"layer {layer} attends with sliding_window {window}, its K/V shape says "
            f"{context.kv.layers[layer].window}",
        )
    if (bias is not None) != context.kv.layers[layer].biased:
        raise _refusal(module, f"layer {layer} scores keys by position, or does not, unlike its K/V shape")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return context, LayerCall(layer, scaling, window, softcap, context.kv.layers[layer].chunk, sinks, bias)


def _layer_index(module: nn.Module, context: AttentionContext) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(context.kv.layers):
        raise _refusal(
            module, f"its layer_idx {layer} is none of the {len(context.kv.layers)} layers with K/V"
        )
    return layer


def _refusal(module: nn.Module, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(module).__name__} cannot be served exactly: {reason}.")
