"""Tiny hybrid models written as GGUF files, the way llama.cpp's converter would write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from tests.support.tiny_gguf import add_tokenizer, finish
from tests.support.tiny_models import tiny_model

_PLAIN = ("conv1d.weight", "conv.conv.weight", "mlp.gate.weight")  # in float32
_COMMON = {
    r"^model\.embed_tokens\.": "token_embd.",
    r"^lm_head\.": "output.",
    r"^model\.layers\.": "blk.",
    r"\.self_attn\.q_proj\.": ".attn_q.",
    r"\.self_attn\.k_proj\.": ".attn_k.",
    r"\.self_attn\.v_proj\.": ".attn_v.",
}
_NAMES = {
    "qwen3_5_hybrid": {
        r"^model\.norm\.": "output_norm.",
        r"\.input_layernorm\.": ".attn_norm.",
        r"\.post_attention_layernorm\.": ".post_attention_norm.",
        r"\.self_attn\.o_proj\.": ".attn_output.",
        r"\.self_attn\.([qk])_norm\.": r".attn_\1_norm.",
        r"\.linear_attn\.in_proj_qkv\.": ".attn_qkv.",
        r"\.linear_attn\.in_proj_z\.": ".attn_gate.",
        r"\.linear_attn\.in_proj_a\.": ".ssm_alpha.",
        r"\.linear_attn\.in_proj_b\.": ".ssm_beta.",
        r"\.linear_attn\.conv1d\.": ".ssm_conv1d.",
        r"\.linear_attn\.norm\.": ".ssm_norm.",
        r"\.linear_attn\.out_proj\.": ".ssm_out.",
        r"\.linear_attn\.A_log$": ".ssm_a",
        r"\.linear_attn\.dt_bias$": ".ssm_dt.bias",
        r"\.mlp\.(gate|up|down)_proj\.": r".ffn_\1.",
    },
    "qwen3_5_moe": {
        r"\.mlp\.gate\.": ".ffn_gate_inp.",
        r"\.mlp\.shared_expert_gate\.": ".ffn_gate_inp_shexp.",
        r"\.mlp\.shared_expert\.(gate|up|down)_proj\.": r".ffn_\1_shexp.",
    },
    "lfm2_hybrid": {
        r"^model\.embedding_norm\.": "token_embd_norm.",
        r"\.operator_norm\.": ".attn_norm.",
        r"\.self_attn\.out_proj\.": ".attn_output.",
        r"\.self_attn\.([qk])_layernorm\.": r".attn_\1_norm.",
        r"\.feed_forward\.w1\.": ".ffn_gate.",
        r"\.feed_forward\.w3\.": ".ffn_up.",
        r"\.feed_forward\.w2\.": ".ffn_down.",
        r"\.conv\.conv\.": ".shortconv.conv.",
        r"\.conv\.(in|out)_proj\.": r".shortconv.\1_proj.",
    },
}


def save_hybrid_gguf(
    path: Path,
    family: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    extra: Callable[[Any], None] = lambda writer: None,
) -> PreTrainedModel:
    """Write a random model of `family`, its matrices of `kind`; returns it with the numbers in the file.

    `extra` may add metadata or tensors to the writer. A Qwen3.5 has room for a module for drafts.
    """
    model = tiny_model(family)
    writer = _WRITERS[family](path, model)
    add_tokenizer(writer)
    extra(writer)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name in tied:
            continue
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
        if ".experts." in name:
            _add_experts(writer, name, parameter, kind)
            continue
        there, back = _layout(name, model.config)
        given = there(parameter.data)
        tensor = _name(family, name)
        if given.dim() == 2 and not name.endswith(_PLAIN):
            blocks = quantize(given.numpy(), kind)
            parameter.data.copy_(back(torch.from_numpy(dequantize(blocks, kind))))
            writer.add_tensor(tensor, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(tensor, given.contiguous().numpy())
    finish(writer)
    return model


def _add_experts(writer: Any, name: str, parameter: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    stem = name.rpartition(".mlp.")[0].replace("model.layers", "blk")
    parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    for part, numbers in zip(parts, parameter.data.chunk(len(parts), dim=1), strict=True):
        blocks = quantize(numbers.contiguous().numpy(), kind)
        numbers.copy_(torch.from_numpy(dequantize(blocks, kind)))
        writer.add_tensor(f"{stem}.ffn_{part}_exps.weight", blocks, raw_dtype=kind)


def _name(family: str, name: str) -> str:
    named_too = _NAMES["qwen3_5_hybrid"] if family == "qwen3_5_moe" else {}
    for pattern, put in (_COMMON | named_too | _NAMES[family]).items():
        name = re.sub(pattern, put, name)
    return name


_Turn = Callable[[torch.Tensor], torch.Tensor]


def _layout(name: str, config: Any) -> tuple[_Turn, _Turn]:
    """What is done to a weight on its way into a file, and back where it may be rounded."""
    if config.model_type == "lfm2":
        return (lambda x: x.squeeze(1) if name.endswith("conv.conv.weight") else x), lambda x: x
    own = name.rpartition(".linear_attn.")[2]
    heads, dim = (config.linear_num_key_heads, config.linear_num_value_heads), config.linear_value_head_dim
    values, each = _tiled(*heads, dim), _tiled(*heads, 1)
    keys = torch.arange(2 * config.linear_key_head_dim * heads[0])
    behind = torch.cat([keys, len(keys) + values])
    rows = {"in_proj_qkv.weight": behind, "in_proj_z.weight": values, "conv1d.weight": behind}
    rows |= dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), each)
    if own in rows:
        order = rows[own]
        turn: _Turn = (
            (lambda x: -x.exp()) if own == "A_log" else (lambda x: x.squeeze(1) if x.dim() == 3 else x)
        )
        return (lambda x: turn(x[order])), lambda x: x[order.argsort()]
    if own == "out_proj.weight":
        return (lambda x: x[:, values].contiguous()), lambda x: x[:, values.argsort()]
    if name.endswith("shared_expert_gate.weight"):
        return (lambda x: x.squeeze(0)), lambda x: x
    is_offset = name.endswith("norm.weight") and own != "norm.weight"
    return (lambda x: x + 1 if is_offset else x), lambda x: x


def _tiled(num_keys: int, num_values: int, dim: int) -> torch.Tensor:
    """The places of rows grouped by key heads where the first value head of each key comes first."""
    return torch.arange(num_values * dim).view(num_keys, -1, dim).transpose(0, 1).reshape(-1)


def _begin_qwen35(path: Path, model: PreTrainedModel) -> Any:
    config = model.config
    is_mixture = hasattr(config, "num_experts")
    writer = gguf.GGUFWriter(path, "qwen35moe" if is_mixture else "qwen35")
    if is_mixture:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([1, 1, 1, 0])
    return writer


def _begin_lfm2(path: Path, model: Any) -> Any:
    config = model.config
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    return writer


_WRITERS = {"qwen3_5_hybrid": _begin_qwen35, "qwen3_5_moe": _begin_qwen35, "lfm2_hybrid": _begin_lfm2}
