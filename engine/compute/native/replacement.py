"""One of our modules in place of a model's own, if it gives what that gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext
from engine.compute.native.closeness import LIMITS, is_close
from engine.compute.native.experts import NativeExperts
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import (
    NativeAttention,
    NativeLinear,
    NativeMlp,
    NativeNorm,
    last_projection,
)
from engine.compute.native.observation import Observation
from engine.compute.native.padded_linear import PaddedLinear
from engine.compute.native.places import Place
from engine.compute.native.records import BLOCKS, MIXED
from engine.compute.native.router import NativeRouter


def names_to_observe(model: nn.Module, places: Iterable[Place]) -> Iterator[str]:
    """The modules of `model` that `make_equal` compares with: those in `places`, and projections in them."""
    for place in places:
        yield place.name
        if last := last_projection(model.get_submodule(place.name)):
            yield f"{place.name}.{last}"


def make_equal(
    original: Any,
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
        return _equal_attention(original, place, observation, context, kernels)
    if place.name_of_kind == Place.MLP:
        mlp = NativeMlp(kernels, original)
        end = _End.of(original, place, observation, mlp.down)
        return mlp if end.is_alike(lambda: mlp(given), seen.output) else None
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
        kind = NativeLinear if NativeLinear.fits(original, kernels.dtype) else PaddedLinear
        made = kind(kernels, original)
    return made if is_close(made(given), seen.output) else None


@dataclass(frozen=True, slots=True)
class _End:
    """The projection that our module ends with, and what the original's was given; None if unseen."""

    projection: NativeLinear
    given: torch.Tensor | None

    @staticmethod
    def of(original: nn.Module, place: Place, observation: Observation, projection: NativeLinear) -> _End:
        seen = observation.seen.get(f"{place.name}.{last_projection(original)}")
        return _End(projection, None if seen is None else seen.given)

    def is_alike(self, answer: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
        """Whether `answer`, of our module, gives what the original gave.

        A projection with weights in blocks rounds its input, and of a difference in the last bits before it
        makes a whole step where a number lies between two. So each side of the rounding is compared for
        itself: what ours is given, and what it makes of what the original's was given.
        """
        if self.given is None or self.projection.weights.kind not in (BLOCKS, MIXED):
            return is_close(answer(), expected)
        found: list[torch.Tensor] = []
        handle = self.projection.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        try:
            answer()
        finally:
            handle.remove()
        before = is_close(found[0].view(self.given.shape), self.given)
        return before and is_close(self.projection(self.given), expected)


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
    original: Any, place: Place, observation: Observation, context: AttentionContext, kernels: NativeKernels
) -> nn.Module | None:
    """As `make_equal`; the keys and values it leaves behind must be equal too."""
    seen = observation.seen[place.name]
    call = observation.calls.get(original.layer_idx)
    rotation = seen.options.get("position_embeddings")
    if call is None or not NativeAttention.rotates(original, rotation):
        return None
    made = NativeAttention(kernels, original, call)
    layer, kv = call.layer, observation.kv
    if kv.layers[layer].shares is not None:  # the layer that writes these may not be ours
        context.kv.keys[layer].copy_(kv.keys[layer])
        context.kv.values[layer].copy_(kv.values[layer])
    options = seen.options | {CONTEXT_KEYWORD: context}
    end = _End.of(original, place, observation, made.output)
    if not end.is_alike(lambda: made(*seen.args, **options)[0], seen.output[0]):
        return None
    pairs = (context.kv.keys, kv.keys), (context.kv.values, kv.values)
    return made if all(is_close(found[layer], expected[layer]) for found, expected in pairs) else None
