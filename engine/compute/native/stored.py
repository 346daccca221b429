"""Stored weights taken over by the kernels as they are stored, one after the other."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn

from config import ModelSettings
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.stored_weights import (
    Stored,
    StoredEmbedding,
    StoredExperts,
    StoredFloats,
    StoredLinear,
    StoredMxfp4,
    StoredWeight,
)
from engine.compute.native.block_panels import BlockPanels, joined, joined_by_experts
from engine.compute.native.compiler import library
from engine.compute.native.experts import NativeExperts
from engine.compute.native.forms import NativeUnavailable, choose_build
from engine.compute.native.kernels import PANEL, NativeKernels
from engine.compute.native.modules import NativeEmbedding, NativeLinear, activation_of
from engine.compute.native.records import Activation

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
        if isinstance(module, StoredLinear | StoredEmbedding | StoredExperts)
    }
    if not stored:
        return loaded
    try:
        build = choose_build(loaded.dtype, settings.cpu_kernels, formats=True)
        kernels = NativeKernels(library(home, build), build.dtype)
    except NativeUnavailable as reason:
        log.warning("weights are unpacked for each use, which is slow: %s", reason)
        return loaded
    packer = _Packer(kernels)
    for name in list(stored):
        made = packer.made(stored.pop(name))
        if made is None:
            log.warning("the kernels do not multiply %s: it is unpacked for each use, which is slow", name)
        else:
            loaded.model.set_submodule(name, made)
    return loaded


def packed_experts(kernels: NativeKernels, experts: StoredExperts) -> NativeExperts | None:
    """The experts in panels; None where the kernels do not compute them as they should."""
    return _Packer(kernels).experts(experts)


def kernels_of(model: nn.Module) -> NativeKernels | None:
    """The kernels that have taken over some of the model's weights; None where none have."""
    found = (module.kernels for module in model.modules() if isinstance(module, NativeLinear))
    return next(found, None)


class _Packer:
    """Makes our modules of those with stored weights; what several of them share is packed once."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._packed: dict[int, tuple[StoredWeight, BlockPanels | None]] = {}  # kept, for their ids are

    def made(self, module: StoredLinear | StoredEmbedding | StoredExperts) -> nn.Module | None:
        """The module in panels; None where its weights are not multiplied as they should be."""
        if isinstance(module, StoredExperts):
            return self.experts(module)
        panels = self._pack(module.stored)
        if panels is None:
            return None
        if isinstance(module, StoredEmbedding):
            return NativeEmbedding(self._kernels, joined([panels]), module.scale)
        bias = None if module.bias is None else module.bias.detach()
        return NativeLinear.of(self._kernels, joined([panels], bias))

    def experts(self, module: StoredExperts) -> NativeExperts | None:
        """Those of a layer, each piece of them packed."""
        stored = module.stored
        activation = Activation.SWIGLU_LIMITED if module.act_fn is None else activation_of(module.act_fn)
        if activation is None or stored.width % PANEL or stored.hidden % PANEL:
            return None
        gate, up, down = (
            [self._pack(each) for each in pieces] for pieces in (stored.gate, stored.up, stored.down)
        )
        found = [[each for each in panels if each is not None] for panels in (gate, up, down)]
        if sum(map(len, found)) < len(stored.pieces):
            return None
        gate_up_bias, down_bias = (
            None if bias is None else bias.to(self._kernels.dtype).flatten()
            for bias in stored.biases or (None, None)
        )
        gate_up = (
            joined_by_experts(found[0], found[1], stored.count, gate_up_bias)
            if stored.gate
            else joined(found[1])
        )
        return NativeExperts.of(self._kernels, gate_up, joined(found[2], down_bias), activation)

    def _pack(self, weight: Stored) -> BlockPanels | None:
        if not isinstance(weight, StoredWeight):  # no two modules have it
            return _pack(self._kernels, weight)
        if id(weight) not in self._packed:
            self._packed[id(weight)] = weight, _pack(self._kernels, weight)
        return self._packed[id(weight)][1]


def _pack(kernels: NativeKernels, weight: Stored) -> BlockPanels | None:
    """The weights in panels; None where they are not multiplied as they should be."""
    if isinstance(weight, StoredMxfp4):
        weight = weight.as_blocks()
    if isinstance(weight, StoredFloats):
        panels = kernels.pack_floats(weight.codes.view(torch.uint8), weight.scales)
    elif not weight.is_blocks:
        return kernels.pack_plain(weight.numbers().to(kernels.dtype))
    elif not kernels.packs_format(int(weight.format), weight.in_features):
        return None
    else:
        panels = kernels.pack_blocks(int(weight.format), weight.blocks, weight.in_features, weight.order)
    x = torch.randn(2, weight.in_features, generator=torch.Generator().manual_seed(0)).to(kernels.dtype)
    found = kernels.linear(x, joined([panels]))[:, :_SAMPLE].float()
    expected = x.float() @ weight.numbers(np.arange(min(_SAMPLE, weight.out))).T
    if isinstance(weight, StoredWeight):
        weight.leave_memory()
    return panels if (found - expected).norm() <= _LIMIT * expected.norm() else None
