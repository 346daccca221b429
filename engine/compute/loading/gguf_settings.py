"""The configuration a GGUF file describes; a setting that would get lost on the way is refused by name.

Transformers' tables read the common settings and pass over the rest in silence. The rest is read here, or
stops the conversion: a window or a frequency scaling less is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.compute.loading.gguf_file import GgufFile, GgufList
from engine.errors import UnsupportedModel

ROPE_FACTORS = "rope_freqs.weight"
# Settings missing from some of transformers' tables, by their name in a configuration.
_ADDED: dict[str, str | None] = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
# Where llama.cpp and transformers call an architecture differently.
_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
# Architectures that transformers' table lacks: the settings that llama.cpp writes for each.
_COMMON: dict[str, str | None] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": None,
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_MORE_TABLES: dict[str, dict[str, str | None]] = {
    "gemma": _COMMON,
    "granite": _COMMON
    | {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "olmo2": _COMMON,
    "olmoe": _COMMON
    | {
        "attention.clamp_kqv": "clip_qkv",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    "smollm3": _COMMON,
}
_VOCABULARY = "tokenizer.ggml.tokens"
# Settings that must repeat the size of a head: anything else is a model with another shape of attention.
_ROTATED = "rope.dimension_count"
_HEAD_SIZES = ("attention.key_length", "attention.value_length", _ROTATED)
# The 27B models of Gemma 2 and 3, by their number of layers: what they divide queries by is in no GGUF file.
_UNSTATED_SCALING = frozenset({("gemma2", 46), ("gemma3_text", 62)})
# How far Llama 3's scaling was trained from (Grattafiori et al., "The Llama 3 Herd of Models", 2024).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_gguf_config(file: GgufFile) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration, and the same settings as transformers' tensor processors want to see them.

    Raises UnsupportedModel for an architecture or a setting that would be lost.
    """
    architecture = str(file.values.get("general.architecture"))
    if architecture in GGUF_CONFIG_ARCHS:
        return _rebuild_config(file, architecture), {}
    model_type = _MODEL_TYPES.get(architecture, architecture)
    tables = _MORE_TABLES | GGUF_CONFIG_MAPPING
    table = tables.get(architecture) or tables.get(model_type)
    if table is None or architecture in ("general", "tokenizer"):
        raise UnsupportedModel(f"The GGUF architecture {architecture!r} is not known.")
    # What the file does not name there is not: the defaults are those of some published model.
    settings: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings |= GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {})
    settings["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in file.tensors)
    _add_settings(settings, file, "tokenizer.", GGUF_CONFIG_MAPPING["tokenizer"])
    settings.setdefault("vocab_size", getattr(file.values.get(_VOCABULARY), "length", None))
    _add_settings(settings, file, f"{architecture}.", _ADDED | table)
    config = AutoConfig.for_model(model_type, **settings)
    _check_nothing_lost(file, architecture, table, config)
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            scaling = _find_scaling(config, tensor.values())
            config = AutoConfig.for_model(model_type, **settings, rope_scaling=scaling)
    return config, settings


class _Watched(dict[str, Any]):
    """Settings that know which of them were read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _rebuild_config(file: GgufFile, architecture: str) -> PreTrainedConfig:
    """The configuration by transformers' own function for the architecture, which must read every setting."""
    watched = _Watched(
        {
            name: (value.length if value.numbers is None else list(value.numbers))
            if isinstance(value, GgufList)
            else value
            for name, value in file.values.items()
        }
    )
    try:
        found = get_gguf_config(watched, tuple(tensor.name for tensor in file.tensors))
    except KeyError as error:
        raise UnsupportedModel(f"The GGUF file has no setting {error}.") from error
    config = AutoConfig.for_model(**found)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in watched.keys() - watched.read:
        setting = name.removeprefix(f"{architecture}.")
        is_known = setting == "vocab_size" or (setting in _HEAD_SIZES and watched[name] == head_size)
        if setting != name and not is_known:
            raise UnsupportedModel(f"The GGUF setting {name} = {watched[name]} cannot be carried over.")
    return config


def _add_settings(
    settings: dict[str, Any], file: GgufFile, prefix: str, table: dict[str, str | None]
) -> None:
    """Take over what the file says under `prefix`, renamed by `table`."""
    for name, renamed in table.items():
        if renamed is not None and prefix + name in file.values:
            settings[renamed] = file.values[prefix + name]


def _check_nothing_lost(
    file: GgufFile, architecture: str, table: dict[str, str | None], config: PreTrainedConfig
) -> None:
    """Raise UnsupportedModel for a setting that was not taken over and would change the model."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = AutoConfig.for_model(config.model_type)  # `config` also keeps settings its model never reads
    known = {name for name, renamed in (_ADDED | table).items() if renamed is None or hasattr(plain, renamed)}
    for name, value in file.values.items():
        if not name.startswith(f"{architecture}."):
            continue
        setting = name.removeprefix(f"{architecture}.")
        if setting == _ROTATED:  # of some architectures a part of a head
            lost = value != int(head_size * _rotated_part(config))
        elif setting in _HEAD_SIZES:
            lost = value != head_size
        else:
            lost = isinstance(value, GgufList) or setting not in known | {"rope.freq_base", "vocab_size"}
        if lost:
            raise UnsupportedModel(f"The GGUF setting {name} = {value} cannot be carried over.")
    if (config.model_type, config.num_hidden_layers) in _UNSTATED_SCALING:
        raise UnsupportedModel(
            f"The GGUF file of a {config.model_type} of this size does not say how queries scale."
        )


def _rotated_part(config: PreTrainedConfig) -> float:
    """How much of each head is rotated."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("partial_rotary_factor", 1.0))


def _find_scaling(config: PreTrainedConfig, factors: Any) -> dict[str, Any]:
    """The rotary scaling that divides each frequency by `factors`; only Llama 3's is known."""
    scaling = _LLAMA3_ROPE | {"factor": float(factors.max())}
    scaled = type(config)(**config.to_dict() | {"rope_parameters": config.rope_parameters | scaling})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(frequencies), 2) / (2 * len(frequencies))
    plain = 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    if not torch.allclose(plain / frequencies, torch.tensor(factors), rtol=1e-3):
        raise UnsupportedModel(f"The rotary scaling in the GGUF tensor {ROPE_FACTORS} is not Llama 3's.")
    return scaling
