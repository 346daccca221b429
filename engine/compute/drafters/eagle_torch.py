"""TorchEagle: an EAGLE layer in tensor operations, on any device; what the kernels are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.slab_rows import SlabRows


class TorchEagle:
    """A DraftLayer."""

    def __init__(self, weights: EagleWeights) -> None:
        self.weights = weights

    @property
    def token_ids(self) -> torch.Tensor:
        """See DraftLayer."""
        return self.weights.token_ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        return F.linear(features, self.weights.fuse)

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return out

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        """See DraftLayer."""
        weights, sizes = self.weights, self.weights.sizes
        residual = hidden
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.hidden_norm, weights.eps)
        if weights.norms_residual:
            residual = normed
        embedded = F.rms_norm(weights.embedding(token_ids), (sizes.hidden,), weights.input_norm, weights.eps)
        qkv = F.linear(torch.cat([embedded, normed], dim=-1), weights.qkv)
        attended = self._attend(qkv, rows)
        hidden = rows.newest(residual) + F.linear(attended, weights.output)
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.mlp_norm, weights.eps)
        gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, weights.down)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        normed = F.rms_norm(out, (out.shape[-1],), self.weights.last_norm, self.weights.eps)
        return F.linear(normed, self.weights.head)

    def _attend(self, qkv: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        of = self.weights.sizes
        heads, kv_heads, dim = of.heads, of.kv_heads, of.head_dim
        sizes = [heads, kv_heads, kv_heads]
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), sizes, dim=1)
        cos, sin = self.weights.rotary(qkv, position_ids=rows.positions[None])
        query, key = (_rotated(part, cos[0, :, None], sin[0, :, None]) for part in (query, key))
        return rows.attend_newest(query, key, value, dim**-0.5).flatten(1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
