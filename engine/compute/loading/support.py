"""Which architectures are refused, and why: everything that a packed pass would not compute exactly.

The rules here look at the configuration and the class, before any weight is read; `layer_probe` then looks at
what the loaded model really asks of attention.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.compute.attention.own_attention import is_rebound
from engine.compute.loading.model_files import UNDER_ANOTHER_NAME, first_line, read_config, tensor_names
from engine.compute.loading.weight_formats import FormatRefused, WeightFormat, read_weight_format
from engine.errors import StartRefused, UnsupportedModel

FULL_ATTENTION, SLIDING_ATTENTION, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
HYBRID = "hybrid"  # attends and is recurrent
CHUNKED_ATTENTION = "chunked_attention"
_LAYER_TYPES = frozenset({FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION})
# That have a causal head, too, which nobody serves.
_ENCODERS = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm"),
        *("xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    }
)
# Architectures whose recurrent layers `mixer_kinds` knows; in most of them some layers attend.
_RECURRENT_MODELS = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
        *("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h"),
        *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
        *("rwkv", "zamba", "zamba2", "zaya"),
    }
)
# Text models that transformers has a causal class for only by the configuration of the whole.
_OF_WHOLE = {"emu3_text_model": "emu3", "mllama_text_model": "mllama"}
# Models whose configuration has no text model apart, and the one that their language model is computed as.
_COMPUTED_AS = {"phi4_multimodal": "phi3"}
# Of layers that mix no tokens, and of all that those models have besides.
IDLE_LAYERS = frozenset({"mlp", "moe"})
_RECURRENT_TYPES = frozenset({RECURRENT, HYBRID, "conv"}) | IDLE_LAYERS
# Angles that depend on a token's own position alone; `dynamic` differs from the plain ones only for positions
# beyond the model's own maximum, which are never served.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that can be served: its configuration as stored, and the transformers class that loads it.

    `is_text_half`: the language model of one that sees or hears as well, of which no other part is read.
    """

    config: PreTrainedConfig
    model_class: Any
    is_text_half: bool = False

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model itself."""
        return self.config.get_text_config(decoder=True)


def read_architecture(directory: Path) -> Architecture:
    """The architecture that `config.json` in `directory` names. Raises UnsupportedModel with the reason."""
    try:
        config = _read_config(directory)
        half = find_text_half(config, directory)
        architecture = Architecture(half or config, find_model_class(half or config), half is not None)
        check_supported(architecture)
    except StartRefused:
        raise
    except Exception as error:  # each configuration class validates in its own way, and few do it wholly
        raise UnsupportedModel(
            f"{directory / 'config.json'} is not understood: {first_line(error)}."
        ) from error
    return architecture


def _read_config(directory: Path) -> PreTrainedConfig:
    """The configuration as transformers reads it, if need be under the name that it knows the model by."""
    path = directory / "config.json"
    values = read_config(directory) if path.is_file() else {}
    name = UNDER_ANOTHER_NAME.get(str(values.get("model_type")))
    if name is None:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    return CONFIG_MAPPING[name].from_dict(values | {"model_type": name})


def find_text_half(config: PreTrainedConfig, directory: Path | None = None) -> PreTrainedConfig | None:
    """The configuration of the language model in one that sees or hears as well; None where there is none.

    None, too, where the class for the whole configuration is the language model's alone and takes it. Whether
    the output embedding is one of its own the weights in `directory` tell, for configurations do not agree on
    who says it.
    """
    text = _as_another(config) or config.get_text_config(decoder=True)
    if _is_assistant(config):
        return None
    if config.is_encoder_decoder or text is config or _found_by(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = find_model_class(config)
        if model_class.config_class is type(config) and not _is_whole(config, model_class):
            return None
    half: PreTrainedConfig = copy.deepcopy(text)
    half.architectures = None
    for name in ("eos_token_id", "dtype", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(half, name, getattr(config, name))
    if directory is not None and (names := _stored_names(directory)):
        half.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in names)
    return half


def _as_another(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The language model as the other model that it is computed as; None where it is one of its own."""
    if config.model_type not in _COMPUTED_AS:
        return None
    found = CONFIG_MAPPING[_COMPUTED_AS[config.model_type]]
    names = {each.name for each in fields(found)} - {"architectures", "model_type"}
    return found(**{name: value for name, value in config.to_dict().items() if name in names})


def _found_by(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """The configuration class by which transformers finds the causal class of `config`."""
    whole = _OF_WHOLE.get(config.model_type)
    return type(config) if whole is None else CONFIG_MAPPING[whole]


def _stored_names(directory: Path) -> list[str]:
    """The names of the weights; none where they are not fetched yet, or damaged, which loading says."""
    try:
        return tensor_names(directory)
    except Exception:  # a damaged file fails in any of a dozen ways
        return []


def _is_whole(config: PreTrainedConfig, model_class: Any) -> bool:
    """True if the class has parts besides the language model."""
    parts = set(config.sub_configs) - {"attn_config", "ffn_config"}
    return bool(parts) and model_class.config_class is type(config)


def find_model_class(config: PreTrainedConfig) -> Any:
    """The transformers class that loads `config` as a causal language model. Raises UnsupportedModel."""
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[_found_by(config)]
    except KeyError:
        raise UnsupportedModel(
            f"The architecture {config.model_type!r} is not a causal language model known to transformers."
        ) from None
    if not isinstance(found, tuple):
        return found
    named = [candidate for candidate in found if candidate.__name__ in (config.architectures or ())]
    return (named or found)[0]


def without_padding(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy in which no token is padding, which models look for in the numbers of their input."""
    config = copy.deepcopy(config)
    # Some classes check that it is a number.
    object.__setattr__(config.get_text_config(decoder=True), "pad_token_id", None)
    return config


def make_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of random weights. Raises UnsupportedModel, and whatever its class raises."""
    if config.model_type not in _OF_WHOLE:
        return AutoModelForCausalLM.from_config(config, **options)
    made: PreTrainedModel = find_model_class(config)._from_config(config, **options)
    return made


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
    if _is_assistant(config):
        yield "it only drafts for another model, whose keys and values it reads"
    if config.model_type in _ENCODERS:
        yield "it is an encoder, made to read and not to write"
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    parts = sorted(set(config.sub_configs) - {"attn_config", "ffn_config"})
    if _is_whole(config, model_class):
        yield f"it is made of several models ({', '.join(parts)})"
    yield from _layer_reasons(architecture.text_config)
    if getattr(architecture.text_config, "alibi", False) and not is_rebound(model_class):
        yield "it biases attention by distance (ALiBi)"
    attends = FULL_ATTENTION in (getattr(architecture.text_config, "layer_types", None) or (FULL_ATTENTION,))
    is_known = architecture.text_config.model_type in _RECURRENT_MODELS
    if model_class._is_stateful and not is_known:
        yield "it carries recurrent state from token to token"
    # Not every class whose layers call the interface says so; that each layer does, the probe sees.
    if attends and not (_calls_interface(model_class) or is_known or is_rebound(model_class)):
        yield "it computes attention itself, not through transformers' attention interface"
    if architecture.is_text_half and getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantized, and it is a part of a model that sees or hears as well"
    try:
        weight_format_of(config)
    except FormatRefused as reason:
        yield str(reason)


def _is_assistant(config: PreTrainedConfig) -> bool:
    """True for a drafter of Gemma 4, which is called with what its target computed."""
    return str(config.model_type).endswith("_assistant")


def _calls_interface(model_class: Any) -> bool:
    """True for a class whose file calls transformers' attention interface."""
    names = vars(sys.modules[model_class.__module__])
    return bool(model_class._supports_attention_backend) or "ALL_ATTENTION_FUNCTIONS" in names


def _layer_reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Reasons in how the layers mix tokens."""
    served = _LAYER_TYPES | (_RECURRENT_TYPES if config.model_type in _RECURRENT_MODELS else set())
    if foreign := sorted(set(getattr(config, "layer_types", None) or ()) - served):
        yield f"it has layers of type {', '.join(foreign)}"
    if getattr(config, "keep_window_size", math.inf) < getattr(config, "max_position_embeddings", 0):
        yield "it leaves tokens out of attention (keep_window_size)"
    if getattr(config, "attention_chunk_size", None) and not getattr(config, "layer_types", None):
        yield "it attends in chunks (attention_chunk_size)"
    # "vision" is for the tokens of images alone, which are not read.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        yield "it attends to later tokens (use_bidirectional_attention)"
    for rope in _rope_settings(config):
        if (rope_type := rope.get("rope_type", "default")) not in _ROPE_TYPES:
            yield f"its rotary embedding is of type {rope_type}"


def _rope_settings(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Each rotary setting of the model: one, or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
