"""Which models stay as they are, and which are looked at."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from config import ModelSettings
from engine.compute.attention import ReferenceAttention
from engine.compute.cuda import layer_choice
from engine.compute.cuda.layer_choice import quick_layer, with_fast_layers
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.mtp_module import MtpModule
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


@pytest.mark.parametrize("kind", ["eagle", "module"])
def test_a_drafters_layer_is_fused_where_the_target_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = cast(EagleWeights, object()) if kind == "eagle" else MtpModule.__new__(MtpModule)
    loaded = load_tiny("llama")
    on_cuda, auto = replace(loaded, device=torch.device("cuda")), ModelSettings(model="tiny")
    assert quick_layer(weights, loaded, auto, 16) is None
    assert quick_layer(weights, on_cuda, ModelSettings(model="tiny", compile="off"), 16) is None
    make, backend = quick_layer(weights, on_cuda, auto, 16), ReferenceAttention()
    modules = SimpleNamespace(fused_layer=lambda *asked: asked)
    monkeypatch.setitem(sys.modules, "engine.compute.cuda.fused_module", modules)
    layers = SimpleNamespace(FusedEagle=lambda *asked: asked)
    monkeypatch.setitem(sys.modules, "engine.compute.cuda.fused_eagle", layers)
    expected = (weights,) if kind == "eagle" else (weights, on_cuda, 16, backend)
    assert make is not None and cast(object, make(backend)) == expected
