"""A model on the kernels with weights of 8-bit integers: half the bytes to read in each step."""

from __future__ import annotations

import logging

import torch
from torch import nn

from engine.compute.loading.loader import LoadedModel
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeLinear
from engine.compute.native.places import find_places
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import logits_distance, packed_sample
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

# The part of their spread by which a model's logits may change. Rounding each weight to a 127th of its
# output's largest makes 0.15 in thirty layers, where bfloat16 makes 0.03; with few weights that are very
# large, the others are lost.
_LIMIT = 0.4


def quantize(loaded: LoadedModel, kernels: NativeKernels) -> None:
    """Turn all weights that the kernels multiply with into integers, freeing each before the next.

    The logits are compared with those before. Raises StartRefused where they are others, and where nothing
    was there to turn.
    """
    before = packed_sample(PackedForward(loaded))
    num_bytes = sum(_quantize(module, kernels) for module in loaded.model.modules())
    if not num_bytes:
        raise unquantized(f"{type(loaded.model).__name__} has no weights that the kernels multiply with")
    distance = logits_distance(packed_sample(PackedForward(loaded)), before)
    if not distance <= _LIMIT:
        raise unquantized(f"it changes the logits by {distance:.2g} of their spread (limit {_LIMIT})")
    log.info(
        "weights of 8-bit integers: %s, logits changed by %.2g of their spread", _size(num_bytes), distance
    )


def unquantized(reason: object) -> StartRefused:
    """What to raise where 8-bit weights are asked for and cannot be had."""
    return StartRefused(f"--quantization int8: {reason}. Leave it out to do without.")


def foresee_weights(outline: nn.Module, dtype: torch.dtype) -> str:
    """What `quantize` would make of a model whose weights are not there, in words."""
    replaced = [outline.get_submodule(place.name) for place in find_places(outline, dtype)]
    linears = [part for module in replaced for part in module.modules() if isinstance(part, nn.Linear)]
    numbers, outputs = (
        sum(part.weight.numel() for part in linears),
        sum(part.out_features for part in linears),
    )
    return (
        f"int8: {_size(numbers + 4 * outputs)} to multiply with instead of {_size(dtype.itemsize * numbers)}"
    )


def _quantize(module: nn.Module, kernels: NativeKernels) -> int:
    """The bytes of the module's own weights, which are integers now."""
    if not isinstance(module, NativeLinear):
        return 0
    module.weights = weights = kernels.quantize(module.weights)
    assert weights.scales is not None
    return weights.packed.nbytes + weights.scales.nbytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
