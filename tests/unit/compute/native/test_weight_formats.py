"""What a model's weights are counted as: by format, each piece of memory once."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Format

from config import load_settings
from engine.compute.loading.gguf_file import read_gguf
from engine.compute.loading.loader import load_model
from engine.compute.loading.model_source import resolve_model
from engine.compute.native import install
from engine.compute.native.quantization import quantize
from engine.compute.native.stored import take_weights
from engine.compute.native.weight_formats import weight_bytes_by_format
from tests.support.native import compiled_home, compiled_kernels
from tests.support.packed import as_loaded
from tests.support.tiny_gguf import save_block_gguf
from tests.support.tiny_models import tiny_model


def test_a_plain_model_is_its_parameters() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes_by_format(model) == {"BF16": size}


def test_rounded_weights_are_counted_by_what_they_became() -> None:
    loaded = as_loaded(tiny_model("llama", dtype=torch.bfloat16, head_dim=32))
    kernels = compiled_kernels(formats=True)
    loaded = install.install(loaded, kernels)
    before = weight_bytes_by_format(loaded.model)
    quantize(loaded, kernels, "int4")
    found = weight_bytes_by_format(loaded.model)
    assert set(before) == {"BF16"} and set(found) == {"BF16", "Q4_1", "Q8_0"}
    assert 0 < found["Q4_1"] + found["Q8_0"] < before["BF16"] - found["BF16"]


def test_blocks_are_counted_by_their_formats_and_a_shared_head_once(tmp_path: Path) -> None:
    path, home = tmp_path / "tied.gguf", compiled_home(formats=True)
    save_block_gguf(path, "qwen3", [Format.Q4_K, Format.Q6_K], tie_word_embeddings=True)
    settings = load_settings(["--model", str(path), "--dtype", "bfloat16"], {}).model
    loaded = take_weights(load_model(resolve_model(settings, tmp_path), settings), settings, home)
    found = weight_bytes_by_format(loaded.model)
    stored = read_gguf(path).format_bytes
    assert set(found) == {"Q4_K", "Q6_K", "BF16"}
    for name in ("Q4_K", "Q6_K"):
        assert stored[name] <= found[name] <= 1.15 * stored[name]
