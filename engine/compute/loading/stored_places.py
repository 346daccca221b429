"""StoredPlaces: in which of a model's modules weights stay as they are stored, with no numbers made of them.

While the model is loaded, a tensor of no size stands for each of its parameters that these are; afterwards it
must still be there: transformers has put it where the name says, and did nothing else with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.compute.loading.stored_weights import (
    ALPHA,
    LIMIT,
    ExpertWeights,
    Stored,
    StoredExperts,
    StoredLinear,
    StoredMxfp4,
)
from engine.compute.native.families import has_limited_experts, has_read_experts, has_ungated_experts


@dataclass(slots=True)
class StoredPlaces:
    """Weights by the names of their modules, and what stands for parameters, by their names.

    `taken` are the names under which files have the weights.
    """

    modules: dict[str, Stored | ExpertWeights] = field(default_factory=dict)
    placeholders: dict[str, Tensor] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def fill(self, model: Any) -> bool:
        """Put the weights into a loaded model; False where it has no placeholders, and is of no use."""
        for name, placeholder in self.placeholders.items():
            if model.get_parameter(name).data_ptr() != placeholder.data_ptr():
                return False
        for name, weights in self.modules.items():
            module = model.get_submodule(name)
            if not isinstance(weights, ExpertWeights):
                bias = None if module.bias is None else module.bias.detach()
                made: nn.Module = StoredLinear(weights, bias)
            elif weights.biases is not None:
                made = StoredExperts(replace(weights, biases=_biases(module)), None)
            else:
                made = StoredExperts(weights, module.act_fn)
            model.set_submodule(name, made)
        return True


def find_stored_places(outline: nn.Module, stored: Mapping[str, Stored], dtype: torch.dtype) -> StoredPlaces:
    """Where weights of a file belong, by their names, in a model that has shapes alone, in `dtype`."""
    found = StoredPlaces()
    for name, module in outline.named_modules():
        if has_read_experts(module):
            _place_experts(found, name, module, stored, dtype)
            continue
        weight = stored.get(name)
        if weight is not None and _fits(weight, module):
            found.modules[name] = weight
            found.taken.add(name)
            found.placeholders[f"{name}.weight"] = _placeholder(module.get_parameter("weight"), dtype)
    return found


def _fits(weight: Stored, module: nn.Module) -> bool:
    """True for a plain projection of that size."""
    return type(module) is nn.Linear and tuple(module.weight.shape) == (weight.out, weight.in_features)


def _place_experts(
    found: StoredPlaces, name: str, module: Any, stored: Mapping[str, Stored], dtype: torch.dtype
) -> None:
    """Those of a layer, whose weights files have expert by expert, or all of them in two tensors."""
    own = ("up_proj" if has_ungated_experts(module) else "gate_up_proj", "down_proj")
    if has_limited_experts(module):
        names = [f"{name}.{each}" for each in own]
        weights = _limited(module, *(stored.get(each) for each in names))
    else:
        count = len(module.down_proj)
        gate, up, down = (
            [f"{name}.{expert}.{each}" for expert in range(count)]
            for each in ("gate_proj", "up_proj", "down_proj")
        )
        parts = ([], up, down) if has_ungated_experts(module) else (gate, up, down)
        names = [each for part in parts for each in part]
        is_whole = all(each in stored for each in names)
        weights = (
            ExpertWeights(count, *([stored[each] for each in part] for part in parts)) if is_whole else None
        )
    if weights is None or not weights.fits(module):
        return
    found.modules[name] = weights
    found.taken.update(names)
    for each in own:
        found.placeholders[f"{name}.{each}"] = _placeholder(module.get_parameter(each), dtype)


def _limited(module: Any, gate_up: Stored | None, down: Stored | None) -> ExpertWeights | None:
    """Of gpt-oss's, of whose outputs a gate's and an up's take turns."""
    if not isinstance(gate_up, StoredMxfp4) or not isinstance(down, StoredMxfp4):
        return None
    if (module.alpha, module.limit) != (ALPHA, LIMIT):
        return None
    gate, up = (StoredMxfp4(gate_up.codes[:, at::2], gate_up.exponents[:, at::2]) for at in (0, 1))
    return ExpertWeights(len(module.down_proj), [gate], [up], [down], biases=_biases(module))


def _biases(module: Any) -> tuple[Tensor, Tensor]:
    """Of gpt-oss's experts, each gate's before its up's."""
    gate_up = module.gate_up_proj_bias.detach()
    return torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1), module.down_proj_bias.detach()


def _placeholder(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of that shape, all of them one."""
    return torch.zeros((), dtype=dtype).expand(parameter.shape)
