"""Which models stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from config import ModelSettings
from engine.compute.cuda import layer_choice
from engine.compute.cuda.layer_choice import with_fast_layers
from engine.compute.loading.loader import LoadedModel
from tests.support.packed import load_tiny


def never() -> LoadedModel:
    raise AssertionError("nothing was changed")


def test_a_model_on_the_cpu_is_left_alone() -> None:
    loaded = load_tiny("llama")
    assert with_fast_layers(loaded, ModelSettings(model="tiny"), 16, never) is loaded


@pytest.mark.parametrize("reason", ["off", "no triton"])
def test_a_model_on_cuda_is_left_alone_where_nothing_can_be_fused(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = replace(load_tiny("llama"), device=torch.device("cuda"))
    if reason == "no triton":
        monkeypatch.setattr(layer_choice, "find_spec", lambda _: None)
    settings = ModelSettings(model="tiny", compile="off" if reason == "off" else "auto")
    assert with_fast_layers(loaded, settings, 16, never) is loaded
