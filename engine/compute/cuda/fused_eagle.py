"""FusedEagle: an EAGLE layer with one launch for what lies between two of its matrix products."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from engine.compute.attention import AttentionContext, LayerCall
from engine.compute.attention.context import HeadTurns
from engine.compute.cuda.fused_norms import add_and_norm, norm
from engine.compute.cuda.fused_products import gate
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.slab_rows import SlabRows


class _Norm(NamedTuple):
    """A RowNorm."""

    weight: torch.Tensor
    variance_epsilon: float
    is_centred: bool = False


class FusedEagle(TorchEagle):
    """A DraftLayer over the same weights, equal to TorchEagle's up to rounding; rows attend together."""

    def __init__(self, weights: EagleWeights) -> None:
        super().__init__(weights)
        norms = weights.input_norm, weights.hidden_norm, weights.mlp_norm, weights.last_norm
        self._norms = [_Norm(weight, weights.eps) for weight in norms]

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        """See DraftLayer."""
        weights, dim = self.weights, self.weights.sizes.head_dim
        of_input, of_hidden, of_mlp, _ = self._norms
        normed = norm(hidden.contiguous(), of_hidden)
        residual = normed if weights.norms_residual else hidden
        embedded = norm(weights.embedding(token_ids), of_input)
        qkv = F.linear(torch.cat([embedded, normed], dim=-1), weights.qkv)
        cosines, sines = (part[0] for part in weights.rotary(qkv, position_ids=rows.positions[None]))
        turns = HeadTurns(cosines, sines, cosines.shape[-1])
        context = cast(AttentionContext, rows.context())
        attended = context.rotate_and_attend(qkv, turns, None, LayerCall(0, dim**-0.5))
        projected = F.linear(rows.newest(attended).flatten(1), weights.output)
        total, normed = add_and_norm(rows.newest(residual).contiguous(), projected, of_mlp)
        return total.addmm_(gate(F.linear(normed, weights.gate_up)), weights.down.t())

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        return F.linear(norm(out.contiguous(), self._norms[-1]), self.weights.head)
