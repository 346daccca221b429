"""NativeRouter: a stand-in for what chooses the experts of each row.

Another product may round a row's logits otherwise among many rows than alone: they would send it to other
experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.native.families import has_read_router, rounds_shares
from engine.compute.native.kernels import PANEL, NativeKernels
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
        self.record = Router(self._weights.record, *counts, is_normed, self._rounds_shares)

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
