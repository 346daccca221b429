"""ExpertsBeside: the experts that layers of Gemma 4 have beside their MLP, with what is around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.cuda.fused_norms import FusedNorm, add, is_norm, norm
from engine.compute.native.families import family_of
from engine.compute.native.layer_form import BESIDE

_NORMS = tuple(name for name in BESIDE if name.endswith(("_1", "_2")))


class ExpertsBeside(nn.Module):
    """What a layer's experts add to its MLP's answer, both normed.

    Three launches, and those of the router and the experts, which are called as they are: three and four.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        family = family_of(layer)
        assert family is not None, "only layers that fit are asked for"
        self.router, self.experts = layer.router, layer.experts
        self.before = FusedNorm(layer.pre_feedforward_layernorm_2, family.norm)
        self.of_mlp = FusedNorm(layer.post_feedforward_layernorm_1, family.norm)
        self.of_experts = FusedNorm(layer.post_feedforward_layernorm_2, family.norm)

    @staticmethod
    def are_of(layer: Any) -> bool:
        """True for a layer that has them."""
        return all(hasattr(layer, name) for name in BESIDE)

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for those that can be computed; the layer's answer is still to be compared."""
        return all(is_norm(getattr(layer, name), dtype) for name in _NORMS)

    def added(self, answer: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """What an MLP answers and what experts make of `total`, which it was normed from; all [N, hidden]."""
        _, shares, chosen = self.router(total)
        answer_of_experts = self.experts(norm(total, self.before), chosen, shares)
        return add(norm(answer, self.of_mlp), answer_of_experts, self.of_experts)
