"""Checkpoints of quantized weights: each number as the format's definition says, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from config import ModelSettings
from engine.compute.loading.loader import load_model
from engine.compute.loading.quantized_files import in_blocks
from engine.compute.loading.stored_weights import StoredFloats, StoredMxfp4
from engine.compute.loading.weight_formats import FormatRefused, read_weight_format
from engine.errors import StartRefused
from tests.support.quantized_checkpoints import (
    Checkpoint,
    awq,
    bitsandbytes,
    compressed_fp8,
    compressed_integers,
    compressed_w8a8,
    fp8,
    gptq,
    mxfp4,
    save_quantized,
)
from tests.support.tiny_models import save_tiny_model, tiny_model

FLOAT32 = ModelSettings(dtype="float32", device="cpu", compile="off")
FORMATS = {
    "gptq": gptq(),
    "gptq-act-order": gptq(act_order=True),
    "gptq-8": gptq(8),
    "gptq-2": gptq(2),
    "gptq-v2": gptq(version=2),
    "awq": awq(),
    "int4": compressed_integers(4),
    "int4-zero-points": compressed_integers(4, symmetric=False),
    "int4-act-order": compressed_integers(4, symmetric=False, act_order=True),
    "int8": compressed_integers(8),
    "w8a8": compressed_w8a8(),
    "fp8-tensor": compressed_fp8("tensor"),
    "fp8-channel": compressed_fp8("channel"),
    "fp8-block": compressed_fp8("block"),
    "deepseek": fp8((24, 48)),
    "deepseek-powers": fp8((32, 32), powers=True),
    "deepseek-tensor": fp8(None),
    "deepseek-128": fp8((128, 128)),
    "deepseek-powers-128": fp8((24, 128), powers=True),
    "nf4": bitsandbytes("nf4"),
    "nf4-nested": bitsandbytes("nf4", nested=True),
    "fp4": bitsandbytes("fp4"),
}


FORMATS_OF_EXPERTS = {"mxfp4": mxfp4()}


@pytest.mark.parametrize("checkpoint", FORMATS.values(), ids=FORMATS)
def test_weights_are_what_the_format_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    expected = save_quantized(tmp_path, checkpoint)
    found = load_model(tmp_path, FLOAT32).model.state_dict()
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-6, atol=1e-9)


def test_gpt_oss_has_mxfp4_experts(tmp_path: Path) -> None:
    expected = save_quantized(tmp_path, mxfp4(), "gpt_oss")
    found = load_model(tmp_path, FLOAT32).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())


KEPT = {
    "fp8-tensor": StoredFloats,
    "fp8-channel": StoredFloats,
    "fp8-block": None,  # a scale for 32 inputs
    "deepseek": None,
    "deepseek-128": StoredFloats,
    "deepseek-powers-128": StoredFloats,
    "deepseek-tensor": StoredFloats,
    "mxfp4": StoredMxfp4,
    "w8a8": None,
    "awq": None,
}


@pytest.mark.parametrize(("name", "kept_as"), KEPT.items())
def test_what_the_kernels_multiply_is_kept_bit_by_bit(name: str, kept_as: type | None) -> None:
    checkpoint = (FORMATS | FORMATS_OF_EXPERTS)[name]
    made = checkpoint.store(200, 320, torch.Generator().manual_seed(5))
    tensors = {ending: each for ending, each in made.tensors.items() if ending != "input_scale"}
    kept = read_weight_format(checkpoint.settings).kept(tensors)
    assert (None if kept is None else type(kept)) == kept_as
    if kept is not None:
        assert torch.equal(kept.numbers(), made.numbers)
        assert torch.equal(kept.numbers(np.array([7, 199])), made.numbers[[7, 199]])
        assert (kept.out, kept.in_features) == (200, 320)


def test_floats_that_are_no_numbers_are_not_kept() -> None:
    made = FORMATS["fp8-channel"].store(64, 64, torch.Generator().manual_seed(5))
    tensors = {ending: each for ending, each in made.tensors.items() if ending != "input_scale"}
    tensors["weight"][3, 5] = torch.nan
    assert read_weight_format(FORMATS["fp8-channel"].settings).kept(tensors) is None


def test_a_model_computes_in_its_own_dtype(tmp_path: Path) -> None:
    expected = save_quantized(tmp_path, awq())
    loaded = load_model(tmp_path, ModelSettings(dtype="bfloat16", device="cpu", compile="off"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded.model.state_dict()[name], expected[name].bfloat16())


def test_fp8_blocks_are_unpacked_as_transformers_does() -> None:
    stored = fp8((16, 32)).store(64, 96, torch.Generator().manual_seed(3)).tensors
    found = read_weight_format({"quant_method": "fp8", "weight_block_size": [16, 32]}).numbers(stored)
    reference = Fp8Dequantize(None)._dequantize_one(
        stored["weight"], stored["weight_scale_inv"], output_dtype=torch.float32
    )
    assert torch.equal(found, reference)


BLOCKS = {
    "gptq": Format.Q5_0,  # zero points anywhere from 1 to 16
    "gptq-act-order": None,  # neighbours have different scales
    "gptq-8": None,  # differences of nine bits
    "awq": Format.Q5_0,
    "int4": Format.Q4_0,
    "int8": Format.Q8_0,
    "w8a8": None,  # scales of single precision
    "nf4": None,
}


@pytest.mark.parametrize(("name", "block_format"), BLOCKS.items())
def test_blocks_hold_exactly_what_integers_with_a_scale_stand_for(
    name: str, block_format: Format | None
) -> None:
    checkpoint = FORMATS[name]
    made = checkpoint.store(48, 64, torch.Generator().manual_seed(5))
    stored = in_blocks(*read_weight_format(checkpoint.settings).unpack(made.tensors))
    assert (None if stored is None else stored.format) == block_format
    if stored is not None:
        assert torch.equal(stored.numbers(), made.numbers)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "quip"}, "quantized by 'quip', which is not known"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits, served are 2, 4 and 8"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ of 4 bits in version 'gemv'"),
        ({"load_in_8bit": True}, "bitsandbytes of 8 bits"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "without config_groups"),
        (compressed_w8a8().settings | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized, served are"),
        (compressed_w8a8().settings | {"sparsity_config": {"format": "sparse-24"}}, "of sparse-24"),
        (
            compressed_w8a8().settings | {"transform_config": {"config_groups": {"R1": {}}}},
            "a transform_config",
        ),
        ({"quant_method": ["gptq"]}, "which is not known"),
        ({"quant_method": "awq", "group_size": None}, r"is not what awq has \(int\(\) argument"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "is not what fp8 has"),
        (
            compressed_w8a8().settings | {"config_groups": {"group_0": None}},
            "is not what compressed-tensors has",
        ),
    ],
)
def test_what_cannot_be_served_as_stored_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatRefused, match=reason):
        read_weight_format(settings)


def test_codes_without_a_scale_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, compressed_w8a8())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartRefused, match=r"layers\.1\.mlp\.down_proj\.weight has no scale") as refused:
        load_model(tmp_path, FLOAT32)
    assert "\n" not in str(refused.value)


def test_experts_that_are_codes_in_one_tensor_are_refused(tmp_path: Path) -> None:
    """Without scales, whose names are not known, they would be numbers that are far too large."""
    directory = save_tiny_model("qwen3_moe", tmp_path)
    tensors = dict(tiny_model("qwen3_moe").state_dict())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scale = tensors[name].abs().amax((1, 2), keepdim=True) / 448
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(StartRefused, match=r"experts\.gate_up_proj has no scale"):
        load_model(directory, FLOAT32)


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, gptq())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.qzeros"
    tensors[name] = tensors[name][:1, :3].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartRefused, match=r"q_proj is not stored as GPTQ, 4 bits in groups of 32"):
        load_model(tmp_path, FLOAT32)
