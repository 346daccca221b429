"""keep_rows: what torch computes beside kernels gives a row the same bits, whatever rows are with it.

A product of torch's may round a row among many otherwise than alone, as in float32. A router
then gives the row other shares of its experts, or other experts. Of a number of rows that never
changes each product is computed in the same way. What is done to every number is done by `alike`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.compute.steady_numbers import alike, steady_product

_OF_NUMBERS = frozenset((F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid))
MOST_NARROW = 1 << 19  # weights of a linear: each call makes floats of them


def keep_rows(model: nn.Module) -> int:
    """Have routers, and linears too narrow for kernels, multiply by blocks of rows: how many there are.

    Linears that give a row the same bits on this machine stay as they are. Norms behind gates, and GELU where
    no kernel has the MLP, are kept from other code for a row alone, too.
    """
    for module in model.modules():
        if _has_numbers(type(module)):
            module.forward = partial(_by_blocks, module.forward)
    routers: list[Any] = [module for module in model.modules() if _is_router(type(module))]
    linears: list[Any] = [each for each in model.modules() if _is_narrow(each) and not _is_steady(each)]
    for router in routers:
        router.forward = partial(_by_blocks, router.forward)
    for linear in linears:
        linear.forward = partial(block_product, weight=linear.weight, bias=linear.bias)
    return len(routers) + len(linears)


def block_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.linear, of rows [.., inputs] in the type they have; sums are float32, and a row's bits its own."""
    product = steady_product(rows.reshape(-1, rows.shape[-1]).float(), weight.float())  # [N, outputs]
    product = product if bias is None else product + bias
    return product.to(rows.dtype).view(*rows.shape[:-1], len(weight))


class _Steady(TorchFunctionMode):
    """Within it F.linear is `block_product`, and functions of every number are computed by `alike`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_NUMBERS:
            rows, *others = args
            return alike(lambda each: func(each, *others, **(kwargs or {})), rows)
        called = block_product if func is F.linear else func
        return called(*args, **(kwargs or {}))


def _is_router(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Router")


def _has_numbers(kind: type[nn.Module]) -> bool:
    name, home = kind.__name__, kind.__module__
    return home.startswith("transformers.") and (
        name.endswith("NormGated") or (home == "transformers.activations" and "GELU" in name)
    )


def _is_narrow(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.numel() <= MOST_NARROW


@torch.inference_mode()
def _is_steady(linear: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, linear.in_features, generator=generator).to(linear.weight.dtype)
    multiply = linear.forward  # without what hooks make of it in a pass
    whole = multiply(rows)
    return all(
        torch.equal(multiply(rows[first : first + count]), whole[first : first + count])
        for count in (1, 2, 5)
        for first in range(0, 10, count)
    )


def _by_blocks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Steady():
        return forward(*args, **kwargs)
