"""What the kernels say they work in, held to what they take."""

from __future__ import annotations

import pytest
import torch

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.install import install, join_layers
from engine.compute.native.scratch import attention_bytes, kept_numbers, layer_numbers, scratch_bytes
from tests.support.native import compiled_kernels
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "starcoder2", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_layers_take_what_is_said(family: str) -> None:
    kernels = compiled_kernels()
    loaded = install(as_loaded(tiny_model(family, dtype=torch.bfloat16, head_dim=32)), kernels)
    join_layers(loaded, kernels)
    base, config = loaded.model.base_model, loaded.config
    assert isinstance(base, NativeDecoder)
    each = layer_numbers(config, loaded.layers)
    assert kernels.decoder_scratch(base._decoder) + config.hidden_size == each  # and a token, embedded
    for num_tokens in (100, 1000):
        room = base._scratch_for(num_tokens)
        assert room.nbytes == 2 * kept_numbers(num_tokens * each)
        assert scratch_bytes(loaded, num_tokens) == room.nbytes + attention_bytes(
            loaded.layers, kernels.team.size
        )


def test_attention_takes_no_more_for_a_longer_context_and_as_much_more_as_there_are_threads() -> None:
    layers = [LayerKv(2, 64, 64), LayerKv(2, 128, 128, 512)]
    assert attention_bytes(layers, 8) == 4 * attention_bytes(layers, 2)
    assert attention_bytes(layers, 64) < 100 * 2**20


def test_a_model_without_kernels_takes_none() -> None:
    assert scratch_bytes(as_loaded(tiny_model("llama")), 100) == 0
