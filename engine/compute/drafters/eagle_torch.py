"""TorchEagle: an EAGLE layer in tensor operations, on any device; what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.compute.drafters.eagle_kv import EagleKv, Span, of_last_rows
from engine.compute.drafters.eagle_weights import EagleWeights


class TorchEagle:
    """A DraftLayer."""

    def __init__(self, weights: EagleWeights, kv: EagleKv) -> None:
        self._weights = weights
        self._kv = kv

    @property
    def token_ids(self) -> torch.Tensor:
        """See DraftLayer."""
        return self._weights.token_ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        return F.linear(features, self._weights.fuse)

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return out

    def compute(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """See DraftLayer."""
        weights, sizes = self._weights, self._weights.sizes
        residual = hidden
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.hidden_norm, weights.eps)
        if weights.norms_residual:
            residual = normed
        embedded = F.rms_norm(weights.embedding(token_ids), (sizes.hidden,), weights.input_norm, weights.eps)
        qkv = F.linear(torch.cat([embedded, normed], dim=-1), weights.qkv)
        attended = self._attend(qkv, positions, spans)
        hidden = of_last_rows(residual, spans) + F.linear(attended, weights.output)
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.mlp_norm, weights.eps)
        gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, weights.down)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        normed = F.rms_norm(out, (out.shape[-1],), self._weights.last_norm, self._weights.eps)
        return F.linear(normed, self._weights.head)

    def _attend(self, qkv: torch.Tensor, positions: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        of = self._weights.sizes
        heads, kv_heads, dim = of.heads, of.kv_heads, of.head_dim
        sizes = [heads, kv_heads, kv_heads]
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), sizes, dim=1)
        where = torch.tensor(positions, device=qkv.device)
        cos, sin = self._weights.rotary(qkv, position_ids=where[None])
        query, key = (_rotated(part, cos[0, :, None], sin[0, :, None]) for part in (query, key))
        return attend_in_slabs(self._kv, spans, of_last_rows(query, spans), key, value).flatten(1)


def attend_in_slabs(
    kv: EagleKv,
    spans: Sequence[Span],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Keep the rows' keys and values and attend, each row within its own slab: [Q, heads, value's dim].

    `query` is [Q, heads, dim], of all N rows or of each span's last; `key` and `value` are [N, kv_heads,
    their dim]; `scale` None is the usual one.
    """
    attended, row, asked = [], 0, 0
    for span in spans:
        own = slice(row, row + span.num_rows)
        num_asking = span.num_rows if len(query) == len(key) else 1
        keys, values, seen = kv.take(span, key[own], value[own])
        found = F.scaled_dot_product_attention(
            query[asked : asked + num_asking].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=seen[-num_asking:],
            scale=scale,
            enable_gqa=True,
        )
        attended.append(found[0].transpose(0, 1))
        row, asked = row + span.num_rows, asked + num_asking
    return torch.cat(attended)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
