"""What the gate of an MLP goes through, in Triton, for dense layers and experts alike."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from engine.compute.native.records import Activation

_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_GELU = tl.constexpr(int(Activation.GELU))
_RELU_SQUARED = tl.constexpr(int(Activation.RELU_SQUARED))
_TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_TANH_CUBE = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))


@triton.jit
def activated(gate, alpha, ACTIVATION: tl.constexpr):
    """ACTIVATION, one of `Activation`, of a gate in float32; SiLU where it is none of those here.

    GELU and its approximation by tanh are those of Hendrycks and Gimpel 2016. `alpha` is the slope of the
    sigmoid in SiLU.
    """
    if ACTIVATION == _RELU_SQUARED:
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        share = gate
    elif ACTIVATION == _GELU:
        share = tl.erf(gate * _ROOT_HALF) * 0.5 + 0.5
    elif ACTIVATION == _GELU_TANH:  # (1 + tanh(x)) / 2 is sigmoid(2 * x)
        share = tl.sigmoid(gate * (gate * gate * _TANH_CUBE + 1.0) * _TANH_SLOPE)
    else:
        share = tl.sigmoid(gate * alpha)
    return gate * share
