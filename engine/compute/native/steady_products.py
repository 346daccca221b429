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

from engine.compute.native.mixture import NativeMixture
from engine.compute.steady_numbers import alike, steady_product

_OF_NUMBERS = frozenset((F.silu, F.gelu, F.softplus, torch.sigmoid, Tensor.sigmoid))
_GATES = frozenset(("g_proj", "shared_expert_gate"))  # linears of transformers, of a head or of a row
_WHOLE = 64  # outputs of a gate: rows of so many fill vectors
MOST_NARROW = 1 << 19  # weights of a linear: each call makes floats of them


def keep_rows(model: nn.Module) -> int:
    """Have routers, and linears too narrow for kernels, multiply by blocks of rows: how many there are.

    Linears that give a row the same bits on this machine stay as they are. Gates of heads and of shared
    experts, norms behind gates, and SiLU and GELU where no kernel has the MLP, are kept from other code for a
    row alone, too.
    """
    for module in model.modules():
        if _has_numbers(type(module)):
            module.forward = partial(_within, _Steady(), module.forward)
    mixtures = [each for each in model.modules() if NativeMixture.fits(each)]  # computed by kernels whole
    ours = {part for each in mixtures for part in each.modules()}
    gates: list[Any] = [
        each for name, each in model.named_modules() if _is_gate(name, each) and each not in ours
    ]
    routers: list[Any] = [module for module in model.modules() if _is_router(type(module))]
    linears: list[Any] = [
        each for each in model.modules() if _is_narrow(each) and each not in ours and not _is_steady(each)
    ]
    for router in routers:
        router.forward = partial(_within, _Steady(multiplies=True), router.forward)
    for linear in linears:
        linear.forward = partial(block_product, weight=linear.weight, bias=linear.bias)
    for gate in gates:
        gate.forward = partial(_open, gate.forward)
    return len(routers) + len(linears)


def block_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.linear, of rows [.., inputs] in the type they have; sums are float32, and a row's bits its own."""
    product = steady_product(rows.reshape(-1, rows.shape[-1]).float(), weight.float())  # [N, outputs]
    product = product if bias is None else product + bias
    return product.to(rows.dtype).view(*rows.shape[:-1], len(weight))


class _Steady(TorchFunctionMode):
    """Within it functions of every number go by `alike`; if it `multiplies`, F.linear by `block_product`."""

    def __init__(self, *, multiplies: bool = False) -> None:
        super().__init__()
        self._multiplies = multiplies

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_NUMBERS:
            return _alike(func, args, kwargs or {})
        called = block_product if self._multiplies and func is F.linear else func
        return called(*args, **(kwargs or {}))


class _Gate(Tensor):
    """What a gate's linear gives. A function of every number of it is computed by `alike`, and is no _Gate.

    A mode around the module that opens the gate would be asked about all else that it calls.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_NUMBERS:
            return _alike(func, (args[0].as_subclass(Tensor), *args[1:]), kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _alike(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    rows, *others = args
    return alike(lambda each: func(each, *others, **kwargs), rows)


def _open(forward: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return forward(rows).as_subclass(_Gate)


def _is_router(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Router")


def _has_numbers(kind: type[nn.Module]) -> bool:
    name, home = kind.__name__, kind.__module__
    if home == "transformers.activations":
        return "GELU" in name or "SiLU" in name
    if not home.startswith("transformers."):
        return False
    called = kind.forward.__code__.co_names
    return name.endswith("NormGated") or (name.endswith("MLP") and ("silu" in called or "sigmoid" in called))


def _is_gate(name: str, module: Any) -> bool:
    return name.rpartition(".")[2] in _GATES and getattr(module, "out_features", 0) % _WHOLE > 0


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


def _within(mode: _Steady, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)
