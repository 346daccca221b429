"""The memory of a model's file, once its weights are packed."""

from pathlib import Path

import torch

from config import load_settings
from engine.compute.loading.loader import load_model
from engine.compute.native.install import with_kernels
from tests.support.native import compiled_home
from tests.support.tiny_models import save_tiny_model


def is_mapped(directory: Path) -> bool:
    return str(directory / "model.safetensors") in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_model_on_kernels_keeps_nothing_of_its_file(tmp_path: Path) -> None:
    home = compiled_home()
    directory = tmp_path / "model"
    save_tiny_model("llama", directory, dtype=torch.bfloat16)
    settings = load_settings([str(directory), "--compile", "on"])
    loaded = load_model(directory, settings.model)
    assert is_mapped(directory)
    loaded = with_kernels(loaded, settings.model, home, lambda: loaded)
    assert not is_mapped(directory)
