"""A linear layer whose weights are in the order that oneDNN reads, put so once and not in each call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

log = logging.getLogger("slipstream.model")

Product = Callable[[Tensor], Tensor]

_ROWS = 256  # that the order of the weights is chosen for; any number can be multiplied
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest result: another order of sums


def product_of(layer: nn.Linear) -> Product:
    """What `layer` computes of [rows, in_features]. Its weights are taken from it where they are packed.

    They stay on other devices, in other formats, and where oneDNN is missing or answers otherwise.
    """
    plain = partial(linear, weight=layer.weight, bias=layer.bias)
    weight = layer.weight
    has_one_dnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not has_one_dnn:
        return plain
    sample = torch.linspace(-1, 1, 3 * layer.in_features, dtype=weight.dtype).view(3, -1)
    try:
        packed = _packed(layer)
        expected, found = plain(sample), packed(sample)
    except (AttributeError, RuntimeError) as error:  # operators of torch's own compiler, which it may change
        log.info("linear layers are computed by torch: %s", error)
        return plain
    most = _MOST_DIFFERENCE[weight.dtype] * expected.abs().max()
    if not (found - expected).abs().max() <= most:
        return plain
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return packed


def _packed(layer: nn.Linear) -> Product:
    operators = torch.ops.mkldnn
    weight = operators._reorder_linear_weight(layer.weight.detach(), _ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    def product(x: Tensor) -> Tensor:
        y: Tensor = operators._linear_pointwise(x, weight, bias, "none", [], "")
        return y

    return product
