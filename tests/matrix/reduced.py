"""A tiny configuration of any causal class: its own defaults, with every size that it names made small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from tests.support.tiny_models import BOS_ID, EOS_ID, MAX_POSITIONS, VOCAB_SIZE, WINDOW

NUM_LAYERS = 4
# By every name that configurations have for a size.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "shared_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), MAX_POSITIONS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    "floor_scale": 8,
    "head_dim": 16,
    "global_head_dim": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "initializer_range": 0.2,
    "pad_token_id": BOS_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "first_k_dense_replace": 1,
    "max_window_layers": 1,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    "mamba_n_groups": 2,
    "mamba_d_ssm": 128,
    "moe_shared_expert_intermediate_size": 32,
}
_EVERY_OTHER_ATTENDS = ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)
_CONVOLUTIONS = ["conv", "full_attention", "full_attention", "conv"]
# What the sizes above do not fit together to.
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": _EVERY_OTHER_ATTENDS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "nemotron_h": {"n_groups": 2},
    "ministral": {"num_key_value_heads": 2, "head_dim": 16},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "minicpm3": {"head_dim": None},
    "deepseek_v2": {"num_experts_per_tok": 2},  # no default
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "hrm_text": {"num_hidden_layers": 1},  # run eight times: more would make much of rounding
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": _CONVOLUTIONS,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * (NUM_LAYERS // 2)},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (NUM_LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_classes() -> Iterator[tuple[type[PreTrainedConfig], type]]:
    """Each configuration class, and the model class that is loaded for it, by the model's name."""
    pairs = []
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        pairs.append((config_class, found[0] if isinstance(found, tuple) else found))
    yield from sorted(pairs, key=lambda pair: (pair[1].__name__, pair[0].__name__))


def reduced_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Small enough for a forward pass in milliseconds. Raises whatever the class raises."""
    default = config_class()
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if _has(default, name) and not _is_read_only(config_class, name)
    }
    sizes |= {"pad_token_id": BOS_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:  # latent attention expands to every head
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
        sizes["head_dim"] = sizes.get("qk_rope_head_dim", 16)  # of what is rotated
    own = _OWN.get(config_class.model_type, {})
    layer_types = getattr(default, "layer_types", None)
    if layer_types and not _is_read_only(config_class, "layer_types"):
        sizes["layer_types"] = _few(layer_types)
    if getattr(default, "mlp_layer_types", None):
        sizes["mlp_layer_types"] = list(default.mlp_layer_types[:NUM_LAYERS])
    text = default.get_text_config(decoder=True)
    if "text_config" in config_class.sub_configs and text is not default:
        sizes["text_config"] = reduced_config(type(text)).to_dict()
    return config_class(**(sizes | own))


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # attributes that differ from layer to layer raise
        return True


def _is_read_only(config_class: type[PreTrainedConfig], name: str) -> bool:
    found = getattr(config_class, config_class.attribute_map.get(name, name), None)
    return isinstance(found, property) and found.fset is None


def _few(layer_types: list[str]) -> list[str]:
    """So many layers that each type is there, in the order of the original."""
    kinds = list(dict.fromkeys(layer_types))
    return [kinds[index % len(kinds)] for index in range(NUM_LAYERS)]
