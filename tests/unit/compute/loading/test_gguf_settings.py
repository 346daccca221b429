"""What of a GGUF file's settings becomes a configuration, and what would be lost on the way."""

from __future__ import annotations

import pytest

from engine.compute.loading.gguf_file import GgufFile, GgufList, Scalar
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.errors import UnsupportedModel

_STABLELM: dict[str, Scalar] = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}


def stablelm(rotated: int) -> GgufFile:
    """Of heads of 16 numbers, of which so many are rotated."""
    settings: dict[str, Scalar] = _STABLELM | {"rope.dimension_count": rotated}
    values: dict[str, Scalar | GgufList] = {"general.architecture": "stablelm"}
    values |= {f"stablelm.{name}": value for name, value in settings.items()}
    return GgufFile(values | {"tokenizer.ggml.tokens": GgufList(512)}, ())


def test_the_part_of_a_head_that_is_rotated_must_be_the_configurations_own() -> None:
    config, _ = read_gguf_config(stablelm(rotated=4))
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    with pytest.raises(UnsupportedModel, match=r"stablelm\.rope\.dimension_count = 16 cannot be carried"):
        read_gguf_config(stablelm(rotated=16))
