"""Models that compute attention themselves, rebound to go through transformers' attention interface.

Only how tokens meet is asked of the function that the interface knows by name; all else stays the class's
own. Until there is such a function a model computes what it always did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.compute.attention.pass_keywords import PassKeywords, keywords_of
from engine.compute.attention.rebindings import REBINDINGS, Rebinding

EAGER = "eager"
_NAME = "slipstream_own_attention"


class OwnAttention:
    """The rebound layers of one model. `name` is the function they attend with, None the class's own."""

    def __init__(self, model: PreTrainedModel, rebinding: Rebinding) -> None:
        self.name: str | None = None
        self._config = model.config
        self._built_with = model.config._attn_implementation
        self._needs_mask = rebinding.needs_mask
        keywords = keywords_of(model)
        found = [layer for layer in model.modules() if type(layer).__name__ == rebinding.layers]
        for place, layer in enumerate(found):
            layer.layer_idx = place  # not every class says it
            setattr(layer, rebinding.method, _Rebound(layer, rebinding, self, keywords))

    def attend_with(self, name: str | None) -> None:
        """Take another function. With one of ours the model builds no mask, if it can do without."""
        self.name = name
        self._config._attn_implementation = self._built_with if name is None or self._needs_mask else name


class _Rebound:
    """Stands for a layer's method."""

    def __init__(self, layer: Any, rebinding: Rebinding, own: OwnAttention, keywords: PassKeywords) -> None:
        self._layer, self._rebinding, self._own, self._keywords = layer, rebinding, own, keywords
        self._unbound = getattr(type(layer), rebinding.method)
        bias = rebinding.bias(layer)
        device = next(layer.parameters()).device
        self._bias = None if bias is None else replace(bias, slopes=bias.slopes.to(device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, rebinding, name = self._layer, self._rebinding, self._own.name
        if name is None:
            return self._unbound(layer, *args, **kwargs)
        query, key, value = rebinding.read(layer, *args, **kwargs)
        attended, _ = ALL_ATTENTION_FUNCTIONS[name](
            layer,
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            None,
            scaling=rebinding.scaling(layer),
            sliding_window=rebinding.window(layer),
            key_bias=self._bias,
            **self._keywords.held,
        )
        return rebinding.give(layer, attended, *args, **kwargs)


def is_rebound(model_class: type) -> bool:
    """Whether attention of models of that class is rebound."""
    return model_class.__name__ in REBINDINGS


def built_with(model_class: Any, name: str) -> str:
    """The `attn_implementation` to make a model with that is to attend with the function `name`."""
    if not is_rebound(model_class):
        return name
    # Falcon's eager attention adds its bias by position twice.
    return "sdpa" if model_class._supports_sdpa else EAGER


def attend_with(model: PreTrainedModel, name: str) -> None:
    """Have `model` attend with the function that transformers' interface knows as `name`.

    With `EAGER` it attends as transformers does.
    """
    own = _own_attention(model)
    if own is None:
        model.set_attn_implementation(name)
    else:
        own.attend_with(None if name == EAGER else name)


@contextmanager
def attending_with(model: PreTrainedModel, name: str) -> Iterator[None]:
    """As `attend_with` for the length of the block."""
    own = _own_attention(model)
    before = model.config._attn_implementation if own is None else own.name or EAGER
    attend_with(model, name)
    try:
        yield
    finally:
        attend_with(model, before)


def _own_attention(model: PreTrainedModel) -> OwnAttention | None:
    """The rebound layers of `model`, the same at every call; None for a model that needs none."""
    if is_rebound(type(model)) and not hasattr(model, _NAME):
        setattr(model, _NAME, OwnAttention(model, REBINDINGS[type(model).__name__]))
    return getattr(model, _NAME, None)
