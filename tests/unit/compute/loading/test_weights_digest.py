"""The digest that K/V on disk is told by: one number of one weight makes another."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.compute.loading.weights_digest import weights_digest
from engine.errors import StartRefused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's files, with weights of some bytes."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(250)) * 400)
    return tmp_path


def test_equal_files_have_equal_digests(model: Path) -> None:
    assert weights_digest(model) == weights_digest(model)
    assert len(weights_digest(model)) == 32


@pytest.mark.parametrize("offset", [0, 50_001, -1])
def test_every_byte_of_the_weights_counts(model: Path, offset: int) -> None:
    before = weights_digest(model)
    content = bytearray((model / "model.safetensors").read_bytes())
    content[offset] ^= 1
    (model / "model.safetensors").write_bytes(content)
    assert weights_digest(model) != before


def test_the_configuration_counts(model: Path) -> None:
    before = weights_digest(model)
    (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 5}')
    assert weights_digest(model) != before


def test_an_empty_file_refuses_the_start(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartRefused, match=r"model\.safetensors cannot be read"):
        weights_digest(model)
