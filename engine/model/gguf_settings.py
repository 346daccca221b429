"""The configuration a GGUF file describes; a setting that would get lost on the way is refused by name.

Transformers' tables read the common settings and pass over the rest in silence. The rest is read here, or
stops the conversion: a window or a frequency scaling less is another model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModel
from engine.model.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
# Settings missing from some of transformers' tables, by their name in a configuration.
_ADDED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
# Settings that must repeat the size of a head: anything else is a model with another shape of attention.
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
# How far Llama 3's scaling was trained from (Grattafiori et al., "The Llama 3 Herd of Models", 2024).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_gguf_config(source: Path, file: GgufFile) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration, and the raw settings that transformers' tensor processors want to see.

    Raises UnsupportedModel for a setting that would be lost.
    """
    settings: dict[str, Any] = load_gguf_checkpoint(str(source))["config"]
    architecture = str(file.values["general.architecture"])
    table = GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING.get(settings["model_type"], {})
    known = table.keys() | set(_HEAD_SIZES) | {"vocab_size"}
    for name, value in _own_settings(file, architecture).items():
        if name in _ADDED:
            settings[_ADDED[name]] = value
        elif name not in known:
            raise UnsupportedModel(
                f"The GGUF setting {architecture}.{name} = {value} cannot be carried over."
            )
    config = AutoConfig.for_model(**settings)
    _check_head_size(file, architecture, config)
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            config = AutoConfig.for_model(**settings, rope_scaling=_find_scaling(config, tensor.values()))
    return config, settings


def _own_settings(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The settings of the architecture, without its name in front."""
    prefix = f"{architecture}."
    return {
        name.removeprefix(prefix): value for name, value in file.values.items() if name.startswith(prefix)
    }


def _check_head_size(file: GgufFile, architecture: str, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel when keys, values or rotated parts are of another size than a head."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _HEAD_SIZES:
        size = file.values.get(f"{architecture}.{name}", head_size)
        if size != head_size:
            raise UnsupportedModel(
                f"The GGUF setting {architecture}.{name} = {size} is no head size {head_size}."
            )


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
