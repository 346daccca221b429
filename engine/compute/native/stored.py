"""A GGUF file's weights taken over by the kernels as they are stored, one after the other."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from config import ModelSettings
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.stored_weights import StoredEmbedding, StoredLinear, StoredWeight
from engine.compute.native.block_panels import BlockPanels, joined
from engine.compute.native.compiler import library
from engine.compute.native.forms import NativeUnavailable, choose_build
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeEmbedding, NativeLinear

log = logging.getLogger("slipstream.model")

_SAMPLE = 32  # outputs that are compared
# The part of its length by which a row may differ: inputs are rounded to a 127th of the largest of 32.
_LIMIT = 0.02


def take_weights(loaded: LoadedModel, settings: ModelSettings, home: Path) -> LoadedModel:
    """The model with its stored weights in the kernels, and itself where there are none or no kernels.

    `loaded` itself is changed: use what is returned.
    """
    stored = {
        name: module
        for name, module in loaded.model.named_modules()
        if isinstance(module, StoredLinear | StoredEmbedding)
    }
    if not stored:
        return loaded
    try:
        build = choose_build(loaded.dtype, settings.cpu_kernels, formats=True)
        kernels = NativeKernels(library(home, build), build.dtype)
    except NativeUnavailable as reason:
        log.warning("weights are unpacked for each use, which is slow: %s", reason)
        return loaded
    packed: dict[int, BlockPanels | None] = {}
    for name, module in stored.items():
        weight = module.stored
        if id(weight) not in packed:
            packed[id(weight)] = _pack(kernels, weight, name)
        panels = packed[id(weight)]
        if panels is None:
            continue
        if isinstance(module, StoredLinear):
            bias = None if module.bias is None else module.bias.detach()
            made: torch.nn.Module = NativeLinear.of(kernels, joined([panels], bias))
        else:
            made = NativeEmbedding(kernels, joined([panels]), module.scale)
        loaded.model.set_submodule(name, made)
    return loaded


def kernels_of(model: torch.nn.Module) -> NativeKernels | None:
    """The kernels that have taken over some of the model's weights; None where none have."""
    found = (module.kernels for module in model.modules() if isinstance(module, NativeLinear))
    return next(found, None)


def _pack(kernels: NativeKernels, weight: StoredWeight, name: str) -> BlockPanels | None:
    """The weights in panels; None, with a warning, where they are not multiplied as they should be."""
    panels = kernels.pack_blocks(int(weight.format), weight.blocks, weight.in_features, weight.order)
    x = torch.randn(2, weight.in_features, generator=torch.Generator().manual_seed(0)).to(kernels.dtype)
    found = kernels.linear(x, joined([panels]))[:, :_SAMPLE].float()
    expected = x.float() @ weight.numbers(np.arange(min(_SAMPLE, weight.out))).T
    weight.leave_memory()
    if (found - expected).norm() <= _LIMIT * expected.norm():
        return panels
    log.warning("%s is multiplied otherwise by the kernels: it is unpacked for each use, which is slow", name)
    return None
