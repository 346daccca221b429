"""A model on the kernels with weights of 8 or 4 bits: fewer bytes to read in each step."""

from __future__ import annotations

import logging

import torch
from torch import nn

from engine.compute.loading.loader import LoadedModel
from engine.compute.native.families import has_read_experts
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeLinear
from engine.compute.native.places import find_places
from engine.compute.native.records import ELEMENTS
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import logits_distance, packed_sample
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

Q4_1, Q8_0 = 3, 8  # ggml's numbers
_GROUP = 32
# The bits of a weight with its part of a scale and a least value.
_BITS = {"int8": 8.5, "int4": 5.0}
_FORMATS = {"int8": Q8_0, "int4": Q4_1}
# The part of their spread by which a model's logits may change. Rounding to a 127th of the largest of 32
# makes less than 0.15 in thirty layers, where bfloat16 makes 0.03; very large weights spoil their neighbours.
_LIMITS = {"int8": 0.4, "int4": 0.8}


def quantize(loaded: LoadedModel, kernels: NativeKernels, asked: str) -> None:
    """Round all weights that kernels multiply with as `--quantization` asks, freeing each before the next.

    The head keeps 8 bits, since its errors go straight into the logits, which are compared with those before.
    Raises StartRefused where they are others, and where nothing was there to round.
    """
    before = packed_sample(forward_of(loaded))
    head = loaded.model.get_output_embeddings()
    num_bytes = 0
    for module in loaded.model.modules():
        if isinstance(module, NativeLinear) and module.weights.kind == ELEMENTS and _has_groups(module):
            module.weights = kernels.quantize(module.weights, Q8_0 if module is head else _FORMATS[asked])
            num_bytes += sum(part.panels.nbytes for part in module.weights.parts)
    if not num_bytes:
        raise unquantized(
            f"{type(loaded.model).__name__} has no weights that the kernels multiply with", asked
        )
    distance = logits_distance(packed_sample(forward_of(loaded)), before)
    if not distance <= _LIMITS[asked]:
        raise unquantized(
            f"it changes the logits by {distance:.2g} of their spread (limit {_LIMITS[asked]})", asked
        )
    log.info(
        "weights of %s-bit integers: %s, logits changed by %.2g of their spread",
        asked.removeprefix("int"),
        _size(num_bytes),
        distance,
    )


def unquantized(reason: object, asked: str) -> StartRefused:
    """What to raise where weights of fewer bits are asked for and cannot be had."""
    return StartRefused(f"--quantization {asked}: {reason}. Leave it out to do without.")


def foresee_weights(outline: nn.Module, dtype: torch.dtype, asked: str) -> str:
    """What `quantize` would make of a model whose weights are not there, in words."""
    replaced = [outline.get_submodule(place.name) for place in find_places(outline, dtype)]
    parts = [part for module in replaced for part in module.modules()]
    head = getattr(outline, "get_output_embeddings", lambda: None)()
    weights = [(part.weight, part is head) for part in parts if isinstance(part, nn.Linear)]
    weights += [(each, False) for part in parts if has_read_experts(part) for each in part.parameters()]
    numbers = sum(weight.numel() for weight, _ in weights)
    bits = sum(
        weight.numel() * _BITS["int8" if is_head else asked]
        if weight.shape[-1] % _GROUP == 0
        else 8 * dtype.itemsize * weight.numel()
        for weight, is_head in weights
    )
    return f"{asked}: {_size(bits / 8)} to multiply with instead of {_size(dtype.itemsize * numbers)}"


def _has_groups(linear: NativeLinear) -> bool:
    return linear.in_features % _GROUP == 0


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
