"""`--quantization` on a CUDA device: weights rounded to integers one by one on their way there."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from engine.compute.loading.coded_weights import (
    CodedLinear,
    CodeKind,
    code_kinds,
    foreseen_linear,
    round_weights,
)
from engine.compute.native.families import coded_linears
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

# The bits of a weight with its part of a scale and a zero point.
_BITS = {"int8": 8.5, "int4": 5.0}
KINDS = {"int8": CodeKind.INT8, "int4": CodeKind.INT4}
GROUP = 32  # inputs with one scale, as on a CPU
# The part of its length by which what an input is multiplied with may change, on average. Weights that are
# spread evenly change by 0.006 and 0.08; those of one input that are very large spoil its neighbours'.
_LIMITS = {"int8": 0.03, "int4": 0.2}


@torch.no_grad()
def round_linears(model: Any, asked: str, device: torch.device) -> None:
    """Round the weights of all projections but the head, each on `device`, where its codes stay.

    The head keeps its numbers, since its errors go straight into the logits. Raises StartRefused where
    weights change too much, are codes already, or are none at all.
    """
    if code_kinds(model):
        raise _refused("the weights are quantized already", asked)
    linears = _rounded_linears(model)
    if not linears:
        raise _refused(f"{type(model).__name__} has no projections to round", asked)
    before = after = 0
    for name, linear in linears.items():
        weights = linear.weight.to(device)
        coded = round_weights(weights, KINDS[asked], GROUP)
        change = _change(weights.float(), coded.numbers())
        if not change <= _LIMITS[asked]:
            raise _refused(
                f"it changes the weights of {name} by {change:.2g} (limit {_LIMITS[asked]})", asked
            )
        model.set_submodule(name, CodedLinear(coded, linear.bias))
        before, after = before + weights.nbytes, after + coded.nbytes
    log.info("weights rounded to %s: %d MiB instead of %d MiB", asked, after >> 20, before >> 20)


def foresee_rounding(outline: Any, asked: str) -> str:
    """What `round_linears` would make of a model whose weights are not there, which then takes so much less.

    In words.
    """
    before = after = 0
    for name, linear in _rounded_linears(outline).items():
        num_bytes = int(linear.weight.numel() * _BITS[asked]) // 8
        outline.set_submodule(name, foreseen_linear(linear, num_bytes))
        before, after = before + linear.weight.nbytes, after + num_bytes
    return f"{asked}: {after >> 20} MiB to multiply with instead of {before >> 20} MiB"


def _change(weights: torch.Tensor, rounded: torch.Tensor) -> float:
    """The mean over inputs of how far their weights have moved, as a part of their length."""
    lengths = weights.norm(dim=0)  # [in]
    distances = (rounded - weights).norm(dim=0)
    return float((distances / lengths.clamp(min=1e-30)).mean())


def _rounded_linears(model: Any) -> dict[str, nn.Linear]:
    """The projections to round, by name."""
    head = model.get_output_embeddings()
    return {
        name: linear
        for name, linear in coded_linears(model).items()
        if linear is not head and linear.in_features % GROUP == 0
    }


def _refused(reason: str, asked: str) -> StartRefused:
    return StartRefused(f"--quantization {asked}: {reason}. Leave it out to do without.")
