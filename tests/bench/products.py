"""All matrix products of one step and nothing else: our kernels, oneDNN with packed weights, plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from engine.compute.native.kernels import NativeKernels

Product = Callable[[torch.Tensor], torch.Tensor]  # [n, in] to [n, out]
Maker = Callable[[torch.Tensor], Product]  # of weights [out, in]

# Those of one input are computed as one, by all sides.
_JOINED = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
MAX_HEAD_ROWS = 64  # the output embedding reads only the rows that are sampled


def joined_weights(model: nn.Module) -> list[torch.Tensor]:
    """The weights [out, in] of a Llama-like model's layers, those of one input side by side."""
    return [
        torch.cat([getattr(parent, name).weight for name in names])
        for parent in model.modules()
        for names in _JOINED
        if all(isinstance(getattr(parent, name, None), nn.Linear) for name in names)
    ]


def plain(weight: torch.Tensor) -> Product:
    """torch's own."""
    return lambda x: linear(x, weight)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of `dtype`, float32 or bfloat16, on this CPU: bfloat16 takes AVX-512."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    takes_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32 or takes_bfloat16


def packed_by_onednn(weight: torch.Tensor) -> Product:
    """Weights in oneDNN's own order, as inductor packs them. Raises RuntimeError where it cannot."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    pointwise: Any = torch.ops.mkldnn._linear_pointwise
    return lambda x: pointwise(x, packed, None, "none", [], "")


def packed_by_us(kernels: NativeKernels) -> Maker:
    """Weights in the order of our kernels."""

    def pack(weight: torch.Tensor) -> Product:
        packed = kernels.pack(weight)
        return lambda x: kernels.linear(x, packed)

    return pack


class Products:
    """The products of every layer and of the output embedding."""

    def __init__(self, layers: Sequence[torch.Tensor], head: torch.Tensor, make: Maker) -> None:
        self._layers = [(weight.shape[1], make(weight)) for weight in layers]
        self._head = head.shape[1], make(head)

    @torch.inference_mode()
    def step_s(self, num_rows: int, num_steps: int) -> float:
        """Mean seconds of one pass over all of them, after one that is not counted."""
        calls = list(self._calls(num_rows))
        for step in range(num_steps + 1):
            if step == 1:
                started = perf_counter()
            for product, x in calls:
                product(x)
        return (perf_counter() - started) / num_steps

    def _calls(self, num_rows: int) -> Iterator[tuple[Product, torch.Tensor]]:
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        for (width, product), rows in (
            *((layer, num_rows) for layer in self._layers),
            (self._head, min(num_rows, MAX_HEAD_ROWS)),
        ):
            x = inputs.setdefault((rows, width), torch.randn(rows, width).to(torch.bfloat16))
            yield product, x
