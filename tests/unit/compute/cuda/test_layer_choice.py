"""Which models stay as they are, and which are looked at."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from config import ModelSettings
from engine.compute.cuda import layer_choice
from engine.compute.cuda.layer_choice import with_fast_layers
from engine.compute.loading.loader import LoadedModel
from tests.support.packed import as_loaded, load_tiny
from tests.support.tiny_models import tiny_model


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


@pytest.mark.parametrize("family", ["llama", "qwen3_next_hybrid"])
def test_any_model_on_cuda_is_looked_at_where_triton_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that carries state as well: its experts may be fused."""
    fused = load_tiny("mixtral")
    seen = SimpleNamespace(with_fused_layers=lambda *_: fused)
    monkeypatch.setitem(sys.modules, "engine.compute.cuda.fused_model", seen)
    monkeypatch.setattr(layer_choice, "find_spec", lambda _: object())
    loaded = replace(as_loaded(tiny_model(family)), device=torch.device("cuda"))
    assert with_fast_layers(loaded, ModelSettings(model="tiny"), 16, never) is fused
