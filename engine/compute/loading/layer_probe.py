"""What a model really asks of attention, and keeps besides, seen in one forward pass over two tokens.

Configurations name head counts and windows in a dozen ways; what the layers hand to the attention function
is the same for all. The pass also shows what no configuration tells: keywords that do not arrive, a mask the
model builds itself, keys that come from another layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from engine.compute.attention.hf_interface import OUR_NAMES, PROBE_NAME
from engine.compute.attention.latent_kv import keep_latents, latent_of
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.layer_places import tell_layers_apart
from engine.compute.attention.own_attention import attending_with, is_rebound
from engine.compute.attention.pass_keywords import hand_on_keywords
from engine.compute.loading.model_files import first_line
from engine.compute.loading.support import CHUNKED_ATTENTION, HYBRID, IDLE_LAYERS, SLIDING_ATTENTION
from engine.compute.recurrent.slot_mixers import read_layer_states
from engine.compute.recurrent.slot_states import LayerState
from engine.errors import UnsupportedModel

_NUM_TOKENS = 2
# Tensors that tell the attention function what it already knows from our own context.
_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position"})
# Those that our attention takes: the score of each head's sink.
_TAKEN_TENSORS = frozenset({"s_aux"})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The K/V shape of each attention layer, what each recurrent one keeps, and the width of the logits.

    Both in order of `layer_idx`; `attending` are those of the attention layers.
    """

    layers: tuple[LayerKv, ...]
    attending: tuple[int, ...]
    states: tuple[LayerState, ...]
    vocab_size: int


def probe_layers(model: PreTrainedModel, config: PreTrainedConfig) -> ProbeResult:
    """Run `model` once on its device and read its layers; its attention implementation is left as it was.

    `config` is the text model's. Raises UnsupportedModel for anything paged attention would not honour.
    """
    states = read_layer_states(model)
    prepare_layers(model)
    if len(states) == config.num_hidden_layers and HYBRID not in _layer_types(config):
        seen, logits = _run(model)
    else:
        AttentionInterface.register(PROBE_NAME, _record_attention)
        with attending_with(model, PROBE_NAME):
            seen, logits = _run(model)
    _check_coverage(seen.layers, states, config)
    layers = dict(sorted(seen.layers.items()))
    for index, layer in layers.items() if not is_rebound(type(model)) else ():
        _check_window(index, layer, config)
    places = {index: place for place, index in enumerate(layers)}
    shapes = (_in_chunks(index, _placed(layer, places), config) for index, layer in layers.items())
    return ProbeResult(tuple(shapes), tuple(layers), states, int(logits.shape[-1]))


def prepare_layers(model: PreTrainedModel) -> None:
    """Have layers tell paged attention what it needs of them; for a model that is not probed itself."""
    tell_layers_apart(model)
    hand_on_keywords(model)
    keep_latents(model, OUR_NAMES)


class _Refusal(Exception):
    """Why the model is refused; carried out of its forward pass, where its name is not known."""


@dataclass(slots=True)
class _Seen:
    """What the attention calls of one pass have shown, by `layer_idx`. `pairs` keeps the tensors alive."""

    layers: dict[int, LayerKv] = field(default_factory=dict)
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def owner(self, key: Tensor, value: Tensor) -> int | None:
        """The layer whose own keys and values these very tensors are; None if they are new."""
        for index, (its_key, its_value) in self.pairs.items():
            if key is its_key and value is its_value:
                return index
        return None

    def overlaps(self, key: Tensor) -> bool:
        """True if keys lie where another layer's do. Without numbers they lie nowhere."""
        return not key.is_meta and any(key.data_ptr() == of.data_ptr() for of, _ in self.pairs.values())


def _run(model: PreTrainedModel) -> tuple[_Seen, Tensor]:
    """One packed pass; the logits are [1, tokens, vocab]."""
    seen = _Seen()
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(_NUM_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode():
            output = model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                slipstream_probe=seen,
            )
    except _Refusal as refusal:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served exactly: {refusal}.") from None
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:  # the last for shapes, too
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served exactly: its forward pass does not accept a packed row "
            f"({first_line(error)})."
        ) from error
    return seen, output.logits


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for attention: notes the layer, answers zeros. Shapes [1, heads, tokens, dim]."""
    seen = kwargs.get("slipstream_probe")
    if seen is None:
        raise _Refusal("it does not pass keywords on to the attention function")
    owner = seen.owner(key, value)
    if owner is None and seen.overlaps(key):
        raise _Refusal("a layer attends to keys that are not its own")
    if reason := _find_refusal(module, key, attention_mask, kwargs, seen):
        raise _Refusal(reason)
    index: int = module.layer_idx  # type: ignore[assignment]  # checked above
    if owner is None:
        seen.pairs[index] = key, value
    window = kwargs.get("sliding_window") or None
    seen.layers[index] = LayerKv(
        key.shape[1],
        key.shape[3],
        value.shape[3],
        window,
        shares=owner,
        biased=kwargs.get("key_bias") is not None,
        value_in_key=latent_of(module) is not None,
    )
    nothing = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    latent = latent_of(module)
    return nothing if latent is None else latent.expand(nothing), None


def _find_refusal(
    module: nn.Module, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any], seen: _Seen
) -> str | None:
    """Why this call is more than causal attention over the step's keys; None if it is not."""
    if getattr(module, "layer_idx", None) is None or module.layer_idx in seen.layers:
        return "its attention calls cannot be told apart by layer"
    if key.shape[2] != _NUM_TOKENS:
        return "a layer attends to keys that are not its own"
    if attention_mask is not None:
        return "it builds an attention mask or position bias itself"
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal", True) is not False):
        return "it attends to later tokens"
    tensors = (
        {name for name, value in kwargs.items() if isinstance(value, Tensor)}
        - _HARMLESS_TENSORS
        - _TAKEN_TENSORS
    )
    return f"its attention takes {', '.join(sorted(tensors))}" if tensors else None


def _check_coverage(
    attending: Collection[int], states: Sequence[LayerState], config: PreTrainedConfig
) -> None:
    """Every layer attends, or is recurrent in a way we know: else it would need a state that is nowhere."""
    types = _layer_types(config)
    known = {index for index, layer_type in enumerate(types) if layer_type in IDLE_LAYERS}
    known |= {*attending, *(state.layer_idx for state in states)}
    both = {index for index, layer_type in enumerate(types) if layer_type == HYBRID}
    passed_by = getattr(config, "cross_attention_layers", None) or ()  # without images
    if known != set(range(int(config.num_hidden_layers) - len(passed_by))) or not both <= set(attending):
        raise UnsupportedModel(
            f"The architecture {config.model_type!r} cannot be served exactly: {len(attending)} of its "
            f"{config.num_hidden_layers} layers use attention, {len(states)} are recurrent in a known way."
        )


def _placed(layer: LayerKv, places: Mapping[int, int]) -> LayerKv:
    """`layer` with its `shares` counted among the layers that attend."""
    return layer if layer.shares is None else replace(layer, shares=places[layer.shares])


def _in_chunks(index: int, layer: LayerKv, config: PreTrainedConfig) -> LayerKv:
    """`layer` with the chunks that its type says, of which the attention function is not told."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[index] != CHUNKED_ATTENTION:
        return layer
    return replace(layer, chunk=int(config.attention_chunk_size))


def _check_window(index: int, layer: LayerKv, config: PreTrainedConfig) -> None:
    """What the layer hands on must be what the configuration promises, or a window would be lost silently.

    One as wide as the whole context leaves no token out: Phi-3.5-MoE promises it, and nobody hands it on.
    """
    layer_types = getattr(config, "layer_types", None)
    declared = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        declared = None
    if layer_types is not None:
        declared = declared if layer_types[index] == SLIDING_ATTENTION else None
    width = getattr(config, "max_position_embeddings", None) or math.inf
    if layer.window is None and isinstance(declared, int) and declared >= width:
        return
    if layer.window != (declared or None):
        raise UnsupportedModel(
            f"The architecture {config.model_type!r} cannot be served exactly: layer {index} attends with a "
            f"window of {layer.window}, its configuration says {declared}."
        )


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    """What the configuration calls each layer; empty where it does not."""
    return getattr(config, "layer_types", None) or ()
