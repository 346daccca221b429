"""A tiny llama model written as a GGUF file, the way llama.cpp's converter would write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.gguf_blocks import random_blocks, unpacked
from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

# Of experts, all of a layer in a tensor; which part of it is each of llama.cpp's.
_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_WITH_PAIRED_HEADS = {"llama", "granite", "smollm3"}
_WITH_NORMS_OF_ONE_MORE = {"gemma"}


def save_tiny_gguf(
    path: Path,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: str | None = None,
    rope_theta: float = 10_000.0,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write `tiny_model("llama")` to `path`, matrices in `quantization`; `without` leaves one tensor out.

    `extra` may add metadata or tensors to the writer.
    """
    config = tiny_config("llama")
    writer = _begun(path, config, rope_theta)
    heads = _interleaved_heads(config)
    for name, parameter in tiny_model("llama").state_dict().items():
        weights = parameter.numpy()
        for part, num_heads in heads.items():
            if part in name:
                weights = _interleave(weights, num_heads)
        if (tensor := name_in_gguf(config, name)) != without:
            _add_tensor(writer, tensor, weights, quantization)
    extra(writer)
    finish(writer)
    return path


def split_gguf(whole: Path, num_parts: int) -> list[Path]:
    """The file cut into parts beside it, as llama.cpp cuts: all metadata in the first, tensors in turn."""
    reader = gguf.GGUFReader(whole)
    paths = [
        whole.with_name(f"{whole.stem}-{part + 1:05}-of-{num_parts:05}.gguf") for part in range(num_parts)
    ]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::num_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def save_block_gguf(
    path: Path, family: str, kinds: Sequence[gguf.GGMLQuantizationType], **changes: Any
) -> PreTrainedModel:
    """Write a random model of `family` whose matrices are random blocks of `kinds` in turn.

    The model in float32, with the numbers that the blocks stand for.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "vocab_size": VOCAB_SIZE,
    }
    if family == "smollm3":  # which layers rotate is in no file: every fourth does not
        sizes |= {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["full_attention"] * 4,
        }
    if family in _ARCHITECTURES:
        sizes |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "mlp_only_layers": []}
    model = tiny_model(family, **(sizes | changes))
    config = model.config
    writer = _begun(path, config, config.rope_parameters["rope_theta"])
    heads = _interleaved_heads(config) if family in _WITH_PAIRED_HEADS else {}
    draw = torch.Generator().manual_seed(0)
    head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
            more = name.endswith("norm.weight") and family in _WITH_NORMS_OF_ONE_MORE
            writer.add_tensor(name_in_gguf(config, name), parameter.squeeze(0).numpy() + np.float32(more))
        elif parameter.dim() == 3:
            matrices = _add_experts(writer, name, parameter, kinds, matrices)
        elif name not in head:
            kind = kinds[matrices % len(kinds)]
            matrices += 1
            out, width = parameter.shape
            blocks = random_blocks(kind, out, width, seed=matrices, spread=0.05)
            numbers = unpacked(kind, blocks)
            for part, num_heads in heads.items():
                if part in name:
                    numbers = torch.from_numpy(_apart(numbers.numpy(), num_heads))
            parameter.data.copy_(numbers)
            writer.add_tensor(name_in_gguf(config, name), blocks, raw_dtype=kind)
    finish(writer)
    return model


def _add_experts(
    writer: Any,
    name: str,
    parameter: torch.Tensor,
    kinds: Sequence[gguf.GGMLQuantizationType],
    matrices: int,
) -> int:
    """Fill experts [experts, out, in] with random blocks, and write these; the matrices so far."""
    prefix, _, own = name.rpartition(".")
    parts = _EXPERTS[own]
    for part, numbers in zip(parts, parameter.data.chunk(len(parts), dim=1), strict=True):
        kind = kinds[matrices % len(kinds)]
        matrices += 1
        count, out, width = numbers.shape
        blocks = random_blocks(kind, count * out, width, seed=matrices, spread=0.05)
        numbers.copy_(unpacked(kind, blocks).view(numbers.shape))
        tensor = f"blk.{prefix.split('.')[2]}.ffn_{part}_exps.weight"
        writer.add_tensor(tensor, blocks.reshape(count, out, -1), raw_dtype=kind)
    return matrices


def _begun(path: Path, config: Any, rope_theta: float) -> Any:
    """A writer that has the settings and the tokenizer."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURES.get(config.model_type, config.model_type))
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in _ARCHITECTURES:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    return writer


def finish(writer: Any) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved_heads(config: Any) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp interleaves."""
    return {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}


def _add_tensor(
    writer: Any, name: str, weights: NDArray[np.float32], quantization: gguf.GGMLQuantizationType
) -> None:
    if weights.ndim == 1 or quantization is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, quantize(weights, quantization), raw_dtype=quantization)


def add_tokenizer(writer: Any) -> None:
    """The one of all tiny models."""
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if token.startswith("<|") else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def name_in_gguf(config: Any, name: str) -> str:
    """What llama.cpp calls a weight, by the table of its own package."""
    known = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = known[_ARCHITECTURES.get(config.model_type, config.model_type)]
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: str | None = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _apart(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undoes `_interleave`."""
    shape = (num_heads, weights.shape[0] // num_heads // 2, 2, weights.shape[1])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))


def _interleave(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rotary halves laid out pairwise, as GGUF keeps the queries and keys of llama."""
    shape = (num_heads, 2, weights.shape[0] // num_heads // 2, weights.shape[1])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))
