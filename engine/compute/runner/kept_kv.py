"""K/V kept in another type than it is computed in: which models that is for, and whether one bears it."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from config import CacheSettings
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import check_block_size, logits_distance, packed_sample
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_NAMES = {kept: name for name, kept in _TYPES.items()}
# The part of their spread by which a model's logits may change. In thirty layers rounding to a 127th of a
# row's largest makes 0.02 to 0.04, where bfloat16 makes 0.03, and rounding to three bits behind the first one
# makes 0.11; where one number of each key is very large, integers make more.
_LIMIT = 0.2
_FP8_CAPABILITY = (8, 9)  # the first GPUs that convert such numbers


def with_kept_kv(loaded: LoadedModel, settings: CacheSettings) -> LoadedModel:
    """The model with its K/V kept as the settings ask. Raises StartRefused where that cannot be."""
    if settings.kv_cache_dtype == "auto":
        return loaded
    kept = _TYPES[settings.kv_cache_dtype]
    if kept is torch.float8_e4m3fn and (reason := _why_no_fp8(loaded.device)):
        raise _refusal(kept, f"{reason}; int8 is served there")
    if loaded.keeps_state:
        raise _refusal(kept, "the model keeps recurrent states")
    if odd := [dim for layer in loaded.layers for dim in (layer.key_dim, layer.value_dim) if dim % 4]:
        raise _refusal(kept, f"heads of {odd[0]} numbers are no multiple of 4")
    return replace(loaded, kept_kv=kept)


def check_kept_kv(loaded: LoadedModel, served_block_size: int) -> None:
    """Raise StartRefused where the model's logits change by more than rounding should make them.

    On a GPU it is asked over blocks of `served_block_size`, which its kernels are compiled for.
    """
    kept = loaded.kept_kv
    if kept is None:
        return
    forward = PackedForward(loaded)
    block_size = check_block_size(loaded.device, served_block_size)
    plain = packed_sample(forward, block_size=block_size)
    distance = logits_distance(packed_sample(forward, kept, block_size), plain)
    if not distance <= _LIMIT:
        raise _refusal(kept, f"it changes the logits by {distance:.2g} of their spread (limit {_LIMIT})")
    log.info("K/V in %s: logits changed by %.2g of their spread", _NAMES[kept], distance)


def _why_no_fp8(device: torch.device) -> str | None:
    """Why K/V is not kept in 8-bit floats on `device`; None where it can be."""
    if device.type != "cuda":
        return f"it is for GPUs, the model is on {device}"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is not None and capability < _FP8_CAPABILITY:
        return f"{device} is of compute capability {capability}, it needs {_FP8_CAPABILITY}"
    return None


def _refusal(kept: torch.dtype, reason: str) -> StartRefused:
    return StartRefused(f"--kv-cache-dtype {_NAMES[kept]}: {reason}. Leave it out to do without.")
