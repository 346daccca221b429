"""K/V kept in another type than it is computed in: which models that is for, and whether one bears it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from config import CacheSettings
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import logits_distance, packed_sample
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

# The part of their spread by which a model's logits may change. Rounding to a 127th of a row's largest makes
# 0.02 in thirty layers, where bfloat16 makes 0.03; where one number of each key is very large, it is more.
_LIMIT = 0.2


def with_kept_kv(loaded: LoadedModel, settings: CacheSettings) -> LoadedModel:
    """The model with its K/V kept as the settings ask. Raises StartRefused where that cannot be."""
    if settings.kv_cache_dtype == "auto":
        return loaded
    if loaded.device.type != "cpu":
        raise _refusal(f"it is for CPUs, the model is on {loaded.device}")
    if loaded.keeps_state:
        raise _refusal("the model keeps recurrent states")
    if odd := [dim for layer in loaded.layers for dim in (layer.key_dim, layer.value_dim) if dim % 4]:
        raise _refusal(f"heads of {odd[0]} numbers are no multiple of 4")
    return replace(loaded, kept_kv=torch.int8)


def check_kept_kv(loaded: LoadedModel) -> None:
    """Raise StartRefused where the model's logits change by more than rounding should make them."""
    if loaded.kept_kv is None:
        return
    forward = PackedForward(loaded)
    distance = logits_distance(packed_sample(forward, loaded.kept_kv), packed_sample(forward))
    if not distance <= _LIMIT:
        raise _refusal(f"it changes the logits by {distance:.2g} of their spread (limit {_LIMIT})")
    log.info("K/V in 8-bit integers: logits changed by %.2g of their spread", distance)


def _refusal(reason: str) -> StartRefused:
    return StartRefused(f"--kv-cache-dtype int8: {reason}. Leave it out to do without.")
