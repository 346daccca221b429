"""What enters single layers of a model while it passes: for drafters that read more than its last state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

Result = TypeVar("Result")


@runtime_checkable
class Tappable(Protocol):
    """A base model that computes its layers in one go, and copies what enters those that are named.

    One that is one past the last stands for what leaves the last, as in `tap`.
    """

    tapped_layers: tuple[int, ...]
    tapped: torch.Tensor | None  # of the last pass, [N, layers * hidden]


def tap(base: nn.Module, layers: Sequence[int], compute: Callable[[], Result]) -> tuple[Result, torch.Tensor]:
    """What `compute`, one pass of the base model, gives, and the residual stream that entered `layers`.

    The latter is [N, layers * hidden], one layer's beside the other's. A layer one past the last is the norm
    behind it: what leaves the last layer. Raises ValueError where the layers are not to be found.
    """
    if isinstance(base, Tappable):
        base.tapped_layers = tuple(layers)
        try:
            result, tapped = compute(), base.tapped
        finally:
            base.tapped_layers, base.tapped = (), None
        assert tapped is not None, "every pass copies what is named"
        return result, tapped
    found: dict[int, torch.Tensor] = {}
    modules = layers_of(base)
    with ExitStack() as hooks:
        for index in set(layers):
            if index == len(modules):
                handle = modules[-1].register_forward_hook(_Leaving(found, index))
            else:
                handle = modules[index].register_forward_pre_hook(_Entering(found, index), with_kwargs=True)
            hooks.callback(handle.remove)
        result = compute()
    return result, torch.cat([found[index] for index in layers], dim=-1)


def base_name(model: PreTrainedModel) -> str:
    """Where a model has its base model. Llama 4 says one name and has it under another."""
    name: str = model.base_model_prefix
    return name if hasattr(model, name) else "model"


def can_tap(base: nn.Module) -> bool:
    """Whether `tap` finds the layers of a base model, and one stream of rows in each; Gemma 3n has four."""
    if getattr(getattr(base, "config", None), "altup_num_inputs", 1) > 1:
        return False
    try:
        return isinstance(base, Tappable) or bool(layers_of(base))
    except ValueError:
        return False


def layers_of(base: nn.Module) -> nn.ModuleList:
    """The decoder layers of a base model, first to last. Raises ValueError where they are in no one list."""
    num_layers = getattr(getattr(base, "config", None), "num_hidden_layers", 0)
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"{type(base).__name__} has no list of {num_layers} layers")


class _Entering:
    """A hook that notes what a layer is given, [N, hidden]."""

    def __init__(self, found: dict[int, torch.Tensor], index: int) -> None:
        self._found = found
        self._index = index

    def __call__(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden: torch.Tensor = args[0] if args else options["hidden_states"]
        self._found[self._index] = hidden[0]


class _Leaving:
    """A hook that notes what a layer gives, [N, hidden]."""

    def __init__(self, found: dict[int, torch.Tensor], index: int) -> None:
        self._found = found
        self._index = index

    def __call__(self, _: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        self._found[self._index] = hidden[0]
