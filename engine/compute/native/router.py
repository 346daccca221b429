"""NativeRouter: a stand-in for what chooses the experts of each row.

Another product may round a row's logits otherwise among many rows than alone: they would send it to other
experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.native.families import family_of, has_read_router, rounds_shares
from engine.compute.native.kernels import NO_NORM, PANEL, NativeKernels
from engine.compute.native.modules import NativeLinear, NativeNorm
from engine.compute.native.records import Router


class NativeRouter(nn.Module):
    """The likeliest experts of each row by a softmax over all, and their chances for shares."""

    def __init__(self, kernels: NativeKernels, original: Any) -> None:
        super().__init__()
        self._kernels = kernels
        weight = original.weight.detach()
        spare = weight.new_zeros(-len(weight) % PANEL, weight.shape[1])  # panels are whole
        bias = getattr(original, "bias", None)
        if bias is not None:
            bias = torch.cat((bias.detach(), bias.new_zeros(len(spare))))
        self._weights = kernels.pack(torch.cat((weight, spare)), bias)
        is_normed = bool(getattr(original, "norm_topk_prob", True))
        self._rounds_shares = rounds_shares(original)
        counts = len(weight), original.top_k
        self.record = Router(self._weights.record, *counts, is_normed, self._rounds_shares, NO_NORM)

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        if not has_read_router(original):
            return False
        weight = original.weight
        return weight.dtype is dtype and weight.shape[1] % 2 == 0

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows [N, hidden] the logits [N, experts], and shares and numbers of those chosen, [N, each]."""
        rows = hidden_states.reshape(-1, self._weights.in_features).contiguous()
        logits, chosen, shares = self._kernels.route(rows, self.record)
        return logits, shares.to(logits.dtype) if self._rounds_shares else shares, chosen


class NativeScaledRouter(nn.Module):
    """Gemma 4's: rows are normed and scaled before they are routed, and each expert's shares have a scale.

    Made of an original whose norm and projection are ours, whose weights must stay where they are.
    """

    def __init__(self, kernels: NativeKernels, original: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self.norm, self.proj = original.norm, original.proj
        self._scale = original.scale.detach().contiguous()
        self._expert_scales = original.per_expert_scale.detach().float().contiguous()
        counts = len(self._expert_scales), original.config.top_k_experts
        self.record = Router(
            *(self.proj.weights.record, *counts, True, False, self.norm.weights.record),
            *(self._scale.data_ptr(), original.scalar_root_size, self._expert_scales.data_ptr()),
        )

    @staticmethod
    def fits(original: Any) -> bool:
        """True for one that was read, whose parts are ours."""
        if family_of(original) is None or type(original).__name__ != "Gemma4TextRouter":
            return False
        if type(original.norm) is not NativeNorm or type(original.proj) is not NativeLinear:
            return False
        dtype = original.proj.kernels.dtype
        return original.scale.dtype is dtype and len(original.per_expert_scale) == original.proj.out_features

    def forward(self, hidden_states: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Of rows [N, hidden] nothing, and shares and numbers of the experts chosen, each [N, each].

        Chances of all experts, which the original gives first, are for who trains it.
        """
        rows = hidden_states.reshape(-1, self.proj.in_features).contiguous()
        _, chosen, shares = self._kernels.route(rows, self.record)
        return None, shares, chosen
