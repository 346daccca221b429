"""A layer's products, each with what follows it, of any number of rows and of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import nn

from engine.compute.cuda.coded_linear import TritonLinear, joined_bias, joined_linear
from engine.compute.cuda.layer_kernels import gate_kernel
from engine.compute.cuda.row_products import added_row_product, gated_row_product, row_product
from engine.compute.loading.coded_weights import are_joinable
from engine.compute.native.records import Activation

Projection: TypeAlias = nn.Linear | TritonLinear

_CHUNK = 1024  # columns that one program gates


class Products(NamedTuple):
    """How a layer's products with a Projection are computed, each with what follows it."""

    project: Callable[[torch.Tensor, Any], torch.Tensor]  # the linear's
    gate: Callable[[torch.Tensor, Any, Activation], torch.Tensor]  # of its first half, times its second
    # Times a number, and a sum, which it may write over; of codes the number is 1.
    add: Callable[[torch.Tensor, Any, torch.Tensor, float], torch.Tensor]


def _project(rows: torch.Tensor, linear: Projection) -> torch.Tensor:
    projected: torch.Tensor = linear(rows)
    return projected


def _gate(rows: torch.Tensor, linear: Projection, activation: Activation) -> torch.Tensor:
    return gate(linear(rows), activation)


def _add(rows: torch.Tensor, linear: Projection, total: torch.Tensor, multiplier: float) -> torch.Tensor:
    if isinstance(linear, TritonLinear):
        assert multiplier == 1.0, "products of codes are added as they are"
        return linear.added(rows, total)
    return total.addmm_(rows, linear.weight.t(), alpha=multiplier)


OF_ROWS = Products(_project, _gate, _add)
OF_ONE_ROW = Products(row_product, gated_row_product, added_row_product)  # of plain weights


def gate(gate_up: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """activation(gate) * up of [rows, 2 * width], the gates first: [rows, width], in one launch."""
    both = gate_up.shape[1]
    return _launch(gate_up, gate_up, (both // 2, both, both, both // 2), activation)


def gate_apart(gates: torch.Tensor, ups: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(`gates`) * `ups`, both [rows, width], of which rows of `ups` may lie apart: the same."""
    width = gates.shape[1]
    return _launch(gates, ups, (width, width, ups.stride(0), 0), activation)


def _launch(
    gates: torch.Tensor, ups: torch.Tensor, sizes: tuple[int, int, int, int], activation: Activation
) -> torch.Tensor:
    """Of `sizes`: the width, what a row of gates takes and one of ups, and where in that the first up is."""
    width, gates_apart, ups_apart, first_up = sizes
    gated = gates.new_empty(len(gates), width)
    chunks = triton.cdiv(width, _CHUNK)
    gate_kernel[(len(gates) * chunks,)](
        gates,
        ups,
        gated,
        GATES_APART=gates_apart,
        UPS_APART=ups_apart,
        FIRST_UP=first_up,
        WIDTH=width,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        ACTIVATION=int(activation),
    )
    return gated


def is_projection(linear: Any, dtype: torch.dtype) -> bool:
    """True for one of numbers of that type, or of codes."""
    if isinstance(linear, TritonLinear):
        return True
    return type(linear) is nn.Linear and linear.weight.dtype is dtype


def can_be_joined(linears: Sequence[Any]) -> bool:
    """Whether one product can take the place of all: of numbers, or of codes that are laid out alike."""
    if any(isinstance(linear, TritonLinear) for linear in linears):
        coded = [linear.coded for linear in linears if isinstance(linear, TritonLinear)]
        return len(coded) == len(linears) and are_joinable(coded)
    return True


def joined(linears: Sequence[Any]) -> Projection:
    """One projection with the outputs of all, side by side."""
    if len(linears) == 1:
        only: Projection = linears[0]
        return only
    if isinstance(linears[0], TritonLinear):
        return joined_linear(linears)
    first = linears[0]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    projection = nn.Linear(first.in_features, len(weight), bias=False, device="meta", dtype=weight.dtype)
    projection.weight = nn.Parameter(weight, requires_grad=False)
    if (bias := joined_bias(linears, weight)) is not None:
        projection.bias = nn.Parameter(bias, requires_grad=False)
    return projection
