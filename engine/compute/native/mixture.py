"""NativeMixture: a mixture's router, experts and shared expert, all of them ours, in one call of a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.native.experts import NativeExperts
from engine.compute.native.families import is_read_mixture
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeMlp
from engine.compute.native.records import Mixture, Product
from engine.compute.native.router import NativeRouter

_PARTS = {"gate": NativeRouter, "experts": NativeExperts}
_PARTS_OF_MLP = {"router": NativeRouter, "experts": NativeExperts}  # gpt-oss's, which gives shares, too
_SHARED = {"shared_expert": NativeMlp, "shared_expert_gate": nn.Linear}


class NativeMixture(nn.Module):
    """What each row's experts make of it, and what the shared expert does as far as its gate is open.

    Weights must stay where they are from then on.
    """

    def __init__(self, kernels: NativeKernels, block: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self._gives_shares = hasattr(block, "router")
        self.gate, self.experts = block.router if self._gives_shares else block.gate, block.experts
        self.shared_expert: Any = getattr(block, "shared_expert", None)
        self.shared_expert_gate: Any = getattr(block, "shared_expert_gate", None)
        self.record = Mixture(self.gate.record, self.experts.record, *self._shared_records())

    @staticmethod
    def fits(block: Any) -> bool:
        """True for a mixture whose code was read and whose parts are all ours."""
        parts = {name: type(part) for name, part in block.named_children()}
        return is_read_mixture(block) and parts in (_PARTS, _PARTS | _SHARED, _PARTS_OF_MLP)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """[..., hidden] to the same; where the original gives shares as well, None in their place."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        mixed = self._kernels.compute_mixture(rows, self.record).view(hidden_states.shape)
        return (mixed, None) if self._gives_shares else mixed

    def _shared_records(self) -> tuple[Product, Product, int | None, int]:
        shared = self.shared_expert
        if shared is None:
            return Product(), Product(), None, 0
        gate_weights = self.shared_expert_gate.weight
        records = (linear.weights.record for linear in (shared.gate_up, shared.down))
        return *records, gate_weights.data_ptr(), shared.activation
