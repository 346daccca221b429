"""Tiny checkpoints in each format of quantized weights, written from the format's definition.

Codes, zero points and scales are random; what they stand for is computed from them before they are packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.tiny_models import save_tiny_model, tiny_model

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbours, from the lowest bits on
# As bitsandbytes lists them; NF4 are quantiles of the normal distribution.
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same with a sign
FP4 = tuple(each / 12 for each in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3))


@dataclass
class Stored:
    """A projection: its tensors by the last part of their names, and the weights [out, in] they stand for."""

    tensors: dict[str, Tensor]
    numbers: Tensor


Store = Callable[[int, int, torch.Generator], Stored]


@dataclass
class Checkpoint:
    """How to store a projection of a shape, and what `quantization_config` says of it."""

    settings: dict[str, Any]
    store: Store


def save_quantized(
    directory: Path, checkpoint: Checkpoint, family: str = "llama", **changes: Any
) -> dict[str, Tensor]:
    """A tiny model in `directory`, its projections but the head stored so; returns all its weights.

    Experts are projections, too, each stored alone as in published checkpoints.
    """
    save_tiny_model(family, directory, **changes)
    model, generator = tiny_model(family, **changes), torch.Generator().manual_seed(0)
    plain = {name: weights.clone() for name, weights in model.state_dict().items()}
    stored = dict(plain)

    def store(name: str, out: int, width: int) -> Tensor:
        made = checkpoint.store(out, width, generator)
        stored.update({f"{name}.{ending}": each.contiguous() for ending, each in made.tensors.items()})
        return made.numbers

    is_mxfp4 = checkpoint.settings.get("quant_method") == "mxfp4"  # in which experts alone are stored
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_mxfp4 and name != "lm_head" and module.out_features > 1:
            del stored[f"{name}.weight"]
            plain[f"{name}.weight"] = store(name, module.out_features, module.in_features)
        elif hasattr(module, "gate_up_proj_bias"):
            for own in ("gate_up_proj", "down_proj"):
                count, width, out = stored.pop(f"{name}.{own}").shape
                made = mxfp4_experts(count, out, width, generator)
                stored.update({f"{name}.{own}_{ending}": each for ending, each in made.tensors.items()})
                plain[f"{name}.{own}"] = made.numbers.mT.contiguous()
        elif hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            gate_up, down = (stored.pop(f"{name}.{own}_proj") for own in ("gate_up", "down"))
            for expert in range(len(down)):
                of_expert, out, width = f"{name}.{expert}", gate_up.shape[1] // 2, gate_up.shape[2]
                both = [store(f"{of_expert}.{own}_proj", out, width) for own in ("gate", "up")]
                plain[f"{name}.gate_up_proj"][expert] = torch.cat(both)
                plain[f"{name}.down_proj"][expert] = store(f"{of_expert}.down_proj", *down.shape[1:])
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": checkpoint.settings}))
    return plain


def packed(codes: Tensor, bits: int) -> Tensor:
    """Integers [rows, n] in int32 [rows, n * bits / 32], the first in the lowest bits."""
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] * bits // 32), dtype=torch.int64)
    for column in range(codes.shape[1]):
        words[:, column * bits // 32] |= codes[:, column].long() << column * bits % 32
    return words.to(torch.int32)


def gptq(bits: int = 4, *, act_order: bool = False, version: int = 1) -> Checkpoint:
    """AutoGPTQ's: inputs share 32 bits, zero points are stored less one."""

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        groups = torch.arange(width) // GROUP
        if act_order:
            groups = groups[torch.randperm(width, generator=generator)]
        codes = torch.randint(0, 2**bits, (out, width), generator=generator)
        zeros = torch.randint(1, 2**bits, (out, width // GROUP), generator=generator)
        scales = _scales((out, width // GROUP), generator).half()
        numbers = torch.stack(
            [(codes[:, i] - zeros[:, g]) * scales[:, g].float() for i, g in enumerate(groups.tolist())], dim=1
        )
        less = 1 if version == 1 else 0
        tensors = {
            "qweight": packed(codes, bits).T,
            "qzeros": packed((zeros - less).T, bits),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return Stored(tensors, numbers)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    return Checkpoint(settings, store)


def awq() -> Checkpoint:
    """AutoAWQ's version for products of matrices: outputs share 32 bits, in an order of their own."""

    def columns(codes: Tensor) -> Tensor:
        words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
        for word in range(words.shape[1]):
            for place, column in enumerate(AWQ_COLUMNS):
                words[:, word] |= codes[:, 8 * word + column].long() << 4 * place
        return words.to(torch.int32)

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        codes, zeros, scales = _groups(4, out, width, generator)
        scales = scales.half()
        numbers = (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
        tensors = {"qweight": columns(codes.T), "qzeros": columns(zeros.T), "scales": scales.T}
        return Stored(tensors, numbers)

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return Checkpoint(settings, store)


def compressed_integers(bits: int, *, symmetric: bool = True, act_order: bool = False) -> Checkpoint:
    """compressed-tensors' `pack-quantized`: integers with a sign, moved up by half of their number."""

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        codes, zeros, scales = _groups(bits, out, width, generator)
        scales, half = scales.bfloat16(), 1 << bits - 1
        groups = torch.arange(width) // GROUP
        if act_order:
            groups = groups[torch.randperm(width, generator=generator)]
        numbers = (codes - (half if symmetric else zeros[:, groups])) * scales.float()[:, groups]
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out, width]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = groups.int()
        return Stored(tensors, numbers)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": GROUP,
    }
    return _compressed("pack-quantized", store, weights)


def compressed_w8a8() -> Checkpoint:
    """compressed-tensors' `int-quantized`: bytes with a scale for each output, and rounded inputs."""

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        codes = torch.randint(-128, 128, (out, width), generator=generator)
        scale = _scales((out, 1), generator)
        return Stored({"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale)

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _compressed("int-quantized", store, weights, inputs)


def compressed_fp8(strategy: str) -> Checkpoint:
    """compressed-tensors' `float-quantized`, with a scale for the tensor, each output or each block."""
    shapes = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "block": (24, 32),
    }  # what one scale is for; 0 = all of them

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        stored = _fp8(out, width, shapes[strategy], generator)
        scale = stored.tensors.pop("scale")
        stored.tensors["weight_scale"] = scale.reshape(1) if strategy == "tensor" else scale
        stored.tensors["input_scale"] = torch.tensor([0.5])
        return stored

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = list(shapes["block"])
    return _compressed("float-quantized", store, weights, {"num_bits": 8, "type": "float", "dynamic": False})


def fp8(block: tuple[int, int] | None, *, powers: bool = False) -> Checkpoint:
    """DeepSeek's and Qwen's: a scale for each block, at the edges of smaller ones, or one for all."""

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        stored = _fp8(out, width, block or (0, 0), generator, powers=powers)
        scale = stored.tensors.pop("scale")
        scale = scale if block is not None else scale.reshape(())
        stored.tensors["weight_scale_inv"] = (scale.log2() + 127).to(torch.uint8) if powers else scale
        return stored

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return Checkpoint(settings, store)


def mxfp4() -> Checkpoint:
    """gpt-oss's."""

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        made = mxfp4_experts(1, out, width, generator)
        return Stored({ending: each[0] for ending, each in made.tensors.items()}, made.numbers[0])

    return Checkpoint({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, store)


def mxfp4_experts(count: int, out: int, width: int, generator: torch.Generator) -> Stored:
    """All experts of a layer, [count, out, width]: a byte has two neighbours, 32 of them a power of two."""
    codes = torch.randint(0, 16, (count, out, width // 32, 32), generator=generator)
    exponents = torch.randint(119, 124, (count, out, width // 32), generator=generator)
    table = torch.tensor(E2M1 + tuple(-each for each in E2M1))
    numbers = (table[codes] * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)
    packed_codes = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return Stored({"blocks": packed_codes, "scales": exponents.to(torch.uint8)}, numbers)


def bitsandbytes(kind: str, *, nested: bool = False) -> Checkpoint:
    """Numbers of a table of sixteen, each 64 of them with a largest one, which may be in blocks too."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def store(out: int, width: int, generator: torch.Generator) -> Stored:
        codes = torch.randint(0, 16, (out * width // 2, 2), generator=generator)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [out, width],
        }
        tensors = {
            "weight": (codes[:, :1] << 4 | codes[:, 1:]).to(torch.uint8),
            "weight.quant_map": table.clone(),
        }
        count = out * width // 64
        if nested:
            nested_codes = torch.randint(0, 256, (count,), generator=generator)
            nested_map, nested_largest = torch.linspace(-1, 1, 256), _scales((-(-count // 256),), generator)
            state |= {"nested_blocksize": 256, "nested_offset": 0.125, "nested_dtype": "float32"}
            tensors |= {
                "weight.absmax": nested_codes.to(torch.uint8),
                "weight.nested_quant_map": nested_map,
                "weight.nested_absmax": nested_largest,
            }
            largest = torch.stack(
                [nested_map[code] * nested_largest[i // 256] + 0.125 for i, code in enumerate(nested_codes)]
            )
        else:
            largest = tensors["weight.absmax"] = _scales((count,), generator)
        name = f"weight.quant_state.bitsandbytes__{kind}"
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        numbers = (table[codes.flatten()].view(count, 64) * largest[:, None]).view(out, width)
        return Stored(tensors, numbers)

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return Checkpoint(settings, store)


def _compressed(
    name: str, store: Store, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Checkpoint:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
    }
    return Checkpoint(settings, store)


def _groups(bits: int, out: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, width] without sign, zero points and scales [out, groups]."""
    codes = torch.randint(0, 2**bits, (out, width), generator=generator)
    zeros = torch.randint(0, 2**bits, (out, width // GROUP), generator=generator)
    return codes, zeros, _scales((out, width // GROUP), generator)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 0.01 + 0.04 * torch.rand(shape, generator=generator)


def _fp8(
    out: int, width: int, block: tuple[int, int], generator: torch.Generator, *, powers: bool = False
) -> Stored:
    """Numbers of 8 bits with a `scale` for each block of rows and columns; 0 rows or columns are all."""
    rows, columns = block[0] or out, block[1] or width
    codes = torch.randn(out, width, generator=generator).to(torch.float8_e4m3fn)
    scale = _scales((-(-out // rows), -(-width // columns)), generator)
    if powers:
        scale = torch.exp2(scale.log2().round())
    numbers = torch.stack(
        [codes[o].float() * scale[o // rows, torch.arange(width) // columns] for o in range(out)]
    )
    return Stored({"weight": codes, "scale": scale}, numbers)
