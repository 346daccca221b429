"""FusedSharing: a mixture and an expert that all rows share, whose last product adds what it answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.cuda.fused_experts import FusedExperts
from engine.compute.cuda.fused_parts import FusedMlp
from engine.compute.cuda.fused_products import OF_ROWS
from engine.compute.cuda.fused_router import FusedRouter
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import Seen
from engine.compute.native.places import is_unhooked

_PARTS = {"gate": FusedRouter, "experts": FusedExperts, "shared_experts": FusedMlp}


class FusedSharing(nn.Module):
    """A mixture with the parts of `original`, which are fused already, equal to it up to rounding."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.gate: FusedRouter = original.gate
        self.experts: FusedExperts = original.experts
        self.shared_experts: FusedMlp = original.shared_experts

    @staticmethod
    def fits(original: Any, _dtype: torch.dtype) -> bool:
        """True for one that has these parts and no others; its output is still to be compared."""
        parts = dict(original.named_children())
        return (
            type(original).__name__.lower().endswith("moe")
            and is_unhooked(original)
            and parts.keys() == _PARTS.keys()
            and all(type(part) is _PARTS[name] for name, part in parts.items())
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        rows = hidden_states.flatten(0, -2)
        _, shares, chosen = self.gate(rows)
        answers = self.experts(rows, chosen, shares)  # nobody else's: they may be written over
        return self.shared_experts.joined.added(rows, answers, OF_ROWS, 1.0).view(hidden_states.shape)


@torch.inference_mode()
def equal_sharing(original: Any, seen: Seen, dtype: torch.dtype) -> FusedSharing | None:
    """The mixture fused; None unless it repeats what that was seen to answer."""
    if seen.given is None or seen.given.dtype is not dtype or len(seen.args) != 1 or seen.options:
        return None
    made = FusedSharing(original)
    return made if is_close(made(seen.given), seen.output) else None
