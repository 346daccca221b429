"""FusedSharing: a mixture with an expert that all rows share, which is one of the others or adds to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.cuda.expert_layout import FEW_ROWS, rows_of_each_way
from engine.compute.cuda.fused_experts import FusedExperts, repeated, summed
from engine.compute.cuda.fused_norms import ExpertAnswers
from engine.compute.cuda.fused_parts import FusedMlp
from engine.compute.cuda.fused_products import OF_ROWS
from engine.compute.cuda.fused_router import FusedRouter, with_shared
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import Seen
from engine.compute.native.places import is_unhooked

_PARTS = {"gate": FusedRouter, "experts": FusedExperts, "shared_experts": FusedMlp}


class FusedSharing(nn.Module):
    """A mixture with the parts of `original`, which are fused already, equal to it up to rounding.

    Of few rows the shared expert is some more of the others, which takes no launch; of more its products are
    those of any MLP, and the last of them adds.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.gate: FusedRouter = original.gate
        self.experts: FusedExperts = original.experts
        self.shared_experts: FusedMlp = original.shared_experts
        mlp = self.shared_experts.joined
        together = self.experts.with_shared(mlp.gate_up, mlp.down, mlp.activation)
        # No parts of their own: their weights are those of the parts above.
        self._of_few: tuple[FusedRouter, FusedExperts] | None = None
        if together is not None:
            self._of_few = with_shared(self.gate, together.shape.num_shared), together

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
        answer = self.computed(hidden_states.flatten(0, -2))
        total = summed(answer) if isinstance(answer, ExpertAnswers) else answer
        return total.view(hidden_states.shape)

    def computed(self, rows: torch.Tensor) -> torch.Tensor | ExpertAnswers:
        """The same of [N, hidden], of few rows not yet summed."""
        if self._of_few is not None and 0 < len(rows) <= FEW_ROWS:
            gate, experts = self._of_few
            _, shares, chosen = gate(rows)
            return experts.answered(rows, chosen, shares)
        _, shares, chosen = self.gate(rows)
        answers = self.experts(rows, chosen, shares)  # nobody else's: they may be written over
        return self.shared_experts.joined.added(rows, answers, OF_ROWS, 1.0)

    @property
    def fewest_rows(self) -> tuple[int, ...]:
        """The fewest rows that are computed in each way there is."""
        if self._of_few is None:
            return ()
        gate, experts = self._of_few
        return rows_of_each_way(gate.choice, experts.shape)


@torch.inference_mode()
def equal_sharing(original: Any, seen: Seen, dtype: torch.dtype) -> FusedSharing | None:
    """The mixture fused; None unless it repeats what that was seen to answer, in every layout of few rows.

    For more rows than were seen these are repeated.
    """
    if seen.given is None or seen.given.dtype is not dtype or len(seen.args) != 1 or seen.options:
        return None
    made = FusedSharing(original)
    given, expected = (each.flatten(0, -2) for each in (seen.given, seen.output))
    for count in (len(given), *made.fewest_rows):
        if not is_close(made(repeated(given, count)), repeated(expected, count)):
            return None
    return made
