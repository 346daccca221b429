"""Layers whose answer is normed for the next one, in the launch that it is computed by."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

import torch

from engine.compute.cuda.fused_norms import FusedNorm, norm
from engine.compute.cuda.fused_products import OF_ROWS, Products
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import Seen

log = logging.getLogger("slipstream.model")


class Linkable(Protocol):
    """A fused layer."""

    next_norm: FusedNorm | None

    @property
    def input_norm(self) -> FusedNorm | None:
        """What its input is normed by; None where nothing is."""
        ...

    @property
    def ends_in_sum(self) -> bool:
        """Whether its answer can be normed in the launch that it is computed by."""
        ...

    def finished(
        self,
        normed: torch.Tensor,
        total: torch.Tensor,
        products: Products,
        brought: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Its answer from what its MLP is given and what this is added to, and `next_norm` of that."""
        ...


def link(layers: Mapping[str, Linkable], seen: Mapping[str, Seen]) -> None:
    """Have layers norm their answers for the next, where that is given this very tensor and normed alike."""
    for (name, layer), (next_name, following) in pairwise(layers.items()):
        by, given = following.input_norm, seen[mlp_of(name)].given
        if by is None or given is None or not layer.ends_in_sum:
            continue
        if seen[next_name].given is not seen[name].output:
            continue
        layer.next_norm = by
        rows, normed = layer.finished(given[0], given[0].clone(), OF_ROWS, *seen[name].args[1:])
        if normed is None or not is_close(normed, norm(rows, by)):
            log.debug("%s norms otherwise for the next layer, which does so itself", name)
            layer.next_norm = None


def mlp_of(layer: str) -> str:
    """The name of what comes behind a layer's second norm."""
    return f"{layer}.mlp"
