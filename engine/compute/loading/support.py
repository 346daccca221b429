"""Which architectures are refused, and why: everything that a packed pass would not compute exactly.

The rules here look at the configuration and the class, before any weight is read; `layer_probe` then looks at
what the loaded model really asks of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from engine.compute.loading.model_files import first_line
from engine.compute.loading.weight_formats import FormatRefused, WeightFormat, read_weight_format
from engine.errors import StartRefused, UnsupportedModel

FULL_ATTENTION, SLIDING_ATTENTION, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
_LAYER_TYPES = frozenset({FULL_ATTENTION, SLIDING_ATTENTION})
# Architectures whose recurrent layers `slot_mixers` knows; in the last one, some or all layers attend.
_RECURRENT_MODELS = frozenset({"mamba", "mamba2", "granitemoehybrid"})
# Angles that depend on a token's own position alone; `dynamic` differs from the plain ones only for positions
# beyond the model's own maximum, which are never served.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that can be served: its configuration as stored, and the transformers class that loads it."""

    config: PreTrainedConfig
    model_class: Any

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model itself."""
        return self.config.get_text_config(decoder=True)


def read_architecture(directory: Path) -> Architecture:
    """The architecture that `config.json` in `directory` names. Raises UnsupportedModel with the reason."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration class validates in its own way
        raise UnsupportedModel(
            f"{directory / 'config.json'} is not understood: {first_line(error)}."
        ) from error
    architecture = Architecture(config, find_model_class(config))
    check_supported(architecture)
    return architecture


def find_model_class(config: PreTrainedConfig) -> Any:
    """The transformers class that loads `config` as a causal language model. Raises UnsupportedModel."""
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModel(
            f"The architecture {config.model_type!r} is not a causal language model known to transformers."
        ) from None
    if not isinstance(found, tuple):
        return found
    named = [candidate for candidate in found if candidate.__name__ in (config.architectures or ())]
    return (named or found)[0]


def weight_format_of(config: PreTrainedConfig) -> WeightFormat | None:
    """How the configuration says that weights are quantized; None for plain ones. Raises FormatRefused."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    return read_weight_format(settings if isinstance(settings, dict) else settings.to_dict())


def check_supported(architecture: Architecture) -> None:
    """Raise UnsupportedModel, naming the class and the first reason, unless the rules here find none."""
    for reason in _reasons(architecture):
        raise UnsupportedModel(f"{architecture.model_class.__name__} cannot be served exactly: {reason}.")


def check_num_layers(config: PreTrainedConfig, num_tensors: int) -> None:
    """Raise StartRefused unless there may be a tensor for each layer: building absurdly many never ends."""
    num_layers = config.num_hidden_layers
    if not 1 <= num_layers <= num_tensors:
        raise StartRefused(
            f"The configuration asks for {num_layers} layers (num_hidden_layers), "
            f"and there are {num_tensors} tensors to fill them."
        )


def exact_context_limit(config: PreTrainedConfig) -> int | None:
    """The longest context at which a token's rotary angles depend on its own position alone; None if always.

    LongRoPE switches all angles of a batch once any position in it passes the original length (Ding et al.,
    "LongRoPE", 2024), so that a request would change with its neighbours.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in _rope_settings(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def _reasons(architecture: Architecture) -> Iterator[str]:
    """Every reason found, the most telling first."""
    config, model_class = architecture.config, architecture.model_class
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    parts = sorted(set(config.sub_configs) - {"attn_config", "ffn_config"})
    if parts and model_class.config_class is type(config):
        yield f"it is made of several models ({', '.join(parts)})"
    yield from _layer_reasons(architecture.text_config)
    attends = FULL_ATTENTION in (getattr(architecture.text_config, "layer_types", None) or (FULL_ATTENTION,))
    if model_class._is_stateful and config.model_type not in _RECURRENT_MODELS:
        yield "it carries recurrent state from token to token"
    if attends and not model_class._supports_attention_backend:
        yield "it computes attention itself, not through transformers' attention interface"
    try:
        weight_format_of(config)
    except FormatRefused as reason:
        yield str(reason)


def _layer_reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Reasons in how the layers mix tokens."""
    served = _LAYER_TYPES | ({RECURRENT} if config.model_type in _RECURRENT_MODELS else set())
    if foreign := sorted(set(getattr(config, "layer_types", None) or ()) - served):
        yield f"it has layers of type {', '.join(foreign)}"
    if getattr(config, "alibi", False):
        yield "it biases attention by distance (ALiBi)"
    if getattr(config, "attention_chunk_size", None):
        yield "it attends in chunks (attention_chunk_size)"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "some of its layers share the keys and values of others (num_kv_shared_layers)"
    if getattr(config, "use_bidirectional_attention", None):
        yield "it attends to later tokens (use_bidirectional_attention)"
    for rope in _rope_settings(config):
        if (rope_type := rope.get("rope_type", "default")) not in _ROPE_TYPES:
            yield f"its rotary embedding is of type {rope_type}"


def _rope_settings(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Each rotary setting of the model: one, or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
