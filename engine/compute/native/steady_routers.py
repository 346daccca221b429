"""keep_routing: routers that torch computes choose a row's experts by itself, whatever rows are beside it.

A product of torch's rounds a row among many otherwise than alone, which gives it other shares of its experts,
or other experts. Of a number of rows that never changes each product is computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ROWS = 8  # of one product: a decode alone pays for as many


def keep_routing(model: nn.Module) -> int:
    """Have transformers' own routers in `model` multiply by blocks of rows: how many there are."""
    routers = [module for module in model.modules() if _is_router(type(module))]
    for router in routers:
        router.forward = partial(_by_blocks, router.forward)
    return len(routers)


def block_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.linear, of rows [.., inputs] in the type they have; sums are float32, and a row's bits its own."""
    flat = rows.reshape(-1, rows.shape[-1]).float()  # [N, inputs]
    blocks = F.pad(flat, (0, 0, 0, -len(flat) % _ROWS)).view(-1, _ROWS, flat.shape[-1])
    sums = torch.bmm(blocks, weight.float().t().expand(len(blocks), -1, -1))  # [blocks, 8, outputs]
    product = sums.view(-1, len(weight))[: len(flat)]
    product = product if bias is None else product + bias
    return product.to(rows.dtype).view(*rows.shape[:-1], len(weight))


class _BlockProducts(TorchFunctionMode):
    """Within it F.linear is `block_product`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = block_product if func is F.linear else func
        return called(*args, **(kwargs or {}))


def _is_router(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Router")


def _by_blocks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _BlockProducts():
        return forward(*args, **kwargs)
