"""One of our modules in place of a model's own, if it gives what that gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext
from engine.compute.native.closeness import LIMITS, is_close
from engine.compute.native.experts import NativeExperts
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeAttention, NativeLinear, NativeMlp, NativeNorm
from engine.compute.native.observation import Observation, Seen
from engine.compute.native.places import Place
from engine.compute.native.router import NativeRouter


def make_equal(
    original: nn.Module,
    place: Place,
    observation: Observation,
    context: AttentionContext,
    kernels: NativeKernels,
) -> nn.Module | None:
    """Our module with the weights of `original`; None unless it repeats what that was seen to answer.

    `context` is the observed step's, over tensors of its own, which attentions fill.
    """
    seen = observation.seen.get(place.name)
    given = None if seen is None else seen.given
    if seen is None or given is None or given.dtype is not kernels.dtype:
        return None
    if place.name_of_kind == Place.ATTENTION:
        return _equal_attention(original, seen, observation, context, kernels)
    if place.name_of_kind == Place.ROUTER:
        return _equal_router(original, given, seen.output, kernels)
    if place.name_of_kind == Place.EXPERTS:
        experts = NativeExperts(kernels, original)
        return experts if is_close(experts(*seen.args, **seen.options), seen.output) else None
    made: nn.Module
    if place.name_of_kind == Place.NORM:
        width = given.shape[-1]
        if not NativeNorm.takes(width):
            return None
        made = NativeNorm(kernels, original, width)
    else:
        made = _SIMPLE[place.name_of_kind](kernels, original)
    return made if is_close(made(given), seen.output) else None


_SIMPLE: dict[str, Any] = {Place.MLP: NativeMlp, Place.LINEAR: NativeLinear}


def _equal_router(
    original: Any, given: torch.Tensor, expected: Sequence[torch.Tensor], kernels: NativeKernels
) -> nn.Module | None:
    """As `make_equal`; a few rows may choose another of two experts that are as likely within rounding."""
    made = NativeRouter(kernels, original)
    logits, shares, chosen = made(given)
    expected_logits, expected_shares, expected_chosen = expected
    found = torch.zeros(logits.shape).scatter(1, chosen, shares.float())
    wanted = torch.zeros(logits.shape).scatter(1, expected_chosen, expected_shares.float())
    distances = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    typical, _ = LIMITS[kernels.dtype]
    is_same = is_close(logits, expected_logits) and bool(distances.quantile(0.75) <= typical)
    return made if is_same and shares.dtype is expected_shares.dtype else None


def _equal_attention(
    original: Any, seen: Seen, observation: Observation, context: AttentionContext, kernels: NativeKernels
) -> nn.Module | None:
    """As `make_equal`; the keys and values it leaves behind must be equal too."""
    call = observation.calls.get(original.layer_idx)
    rotation = seen.options.get("position_embeddings")
    if call is None or not NativeAttention.rotates(original, rotation):
        return None
    made = NativeAttention(kernels, original, call)
    layer, kv = call.layer, observation.kv
    if kv.layers[layer].shares is not None:  # the layer that writes these may not be ours
        context.kv.keys[layer].copy_(kv.keys[layer])
        context.kv.values[layer].copy_(kv.values[layer])
    output, _ = made(*seen.args, **(seen.options | {CONTEXT_KEYWORD: context}))
    pairs = (
        (output, seen.output[0]),
        (context.kv.keys[layer], kv.keys[layer]),
        (context.kv.values[layer], kv.values[layer]),
    )
    return made if all(is_close(found, expected) for found, expected in pairs) else None
