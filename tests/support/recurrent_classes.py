"""Small random models of any class that transformers has, for tests of those with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.compute.loading.layer_probe import probe_layers
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.support import Architecture, check_supported
from tests.matrix.reduced import causal_classes, reduced_config


def model_of(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedModel:
    """A random model of the class, with layers of each of its types and `changes` in its configuration."""
    configs = {config.__name__: config for config, _ in causal_classes()}
    config_class = configs.get(f"{name}TextConfig") or configs[f"{name}Config"]
    config: PreTrainedConfig = reduced_config(config_class)
    for setting, value in changes.items():
        setattr(config, setting, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    check_supported(Architecture(config, type(model)))
    return model.requires_grad_(False).eval()


def loaded_from(model: PreTrainedModel) -> LoadedModel:
    """As the loader would give it."""
    probe = probe_layers(model, model.config)
    return LoadedModel(
        model=model,
        config=model.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=256,
        vocab_size=probe.vocab_size,
        eos_token_ids=frozenset(),
        layers=probe.layers,
        states=probe.states,
        attending=probe.attending,
    )
