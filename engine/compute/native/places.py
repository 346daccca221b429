"""Where in a model our modules could stand, by looks alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from engine.compute.native.experts import NativeExperts
from engine.compute.native.families import READ
from engine.compute.native.modules import NativeAttention, NativeLinear, NativeMlp, NativeNorm
from engine.compute.native.padded_linear import PaddedLinear
from engine.compute.native.router import NativeRouter


@dataclass(frozen=True, slots=True)
class Place:
    """The name of a module in its model, and in plain words what it is."""

    ATTENTION: ClassVar[str] = "attentions"
    MLP: ClassVar[str] = "MLPs"
    EXPERTS: ClassVar[str] = "expert layers"
    ROUTER: ClassVar[str] = "routers"
    NORM: ClassVar[str] = "norms"
    LINEAR: ClassVar[str] = "projections"

    name: str
    name_of_kind: str


_KINDS: tuple[tuple[str, Any], ...] = (
    (Place.ATTENTION, NativeAttention),
    (Place.MLP, NativeMlp),
    (Place.EXPERTS, NativeExperts),
    (Place.ROUTER, NativeRouter),
    (Place.NORM, NativeNorm),
    (Place.LINEAR, NativeLinear),
    (Place.LINEAR, PaddedLinear),
)


def find_places(model: nn.Module, dtype: torch.dtype) -> list[Place]:
    """Every module that one of ours could replace in a model of `dtype`; none lies inside another.

    Modules that stand in several places, or that do more when called than their class says, are left out.
    """
    counts = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return list(_places_in(model, "", counts, dtype))


def _places_in(parent: nn.Module, prefix: str, counts: Counter[int], dtype: torch.dtype) -> Iterator[Place]:
    for name, child in parent.named_children():
        if counts[id(child)] > 1 or not is_unhooked(child) or name in READ:
            continue
        kind = next((kind for kind, made in _KINDS if made.fits(child, dtype)), None)
        if kind is None:
            yield from _places_in(child, f"{prefix}{name}.", counts, dtype)
        elif all(counts[id(part)] == 1 and is_unhooked(part) for part in child.modules()):
            yield Place(prefix + name, kind)


def is_unhooked(module: Any) -> bool:
    """True where calling the module runs its class's own code and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
