"""TorchEagle: an EAGLE layer in tensor operations, on any device; what the kernels are compared with."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import (
    DRAWN_CHANCES,
    GUESSES,
    Chain,
    EagleRound,
    Guess,
    may_matter,
)
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.sampling.noise import gumbel_of, noise_bits
from engine.compute.sampling.processors import Filters, process_logits


class TorchEagle:
    """An EagleCompute. `least_chance` is how likely all drafts of a chain must be for another one."""

    def __init__(self, weights: EagleWeights, kv: EagleKv, least_chance: float) -> None:
        self._weights = weights
        self._kv = kv
        self._least_chance = least_chance

    @torch.inference_mode()
    def run(self, work: EagleRound) -> list[Chain]:
        """See EagleCompute."""
        weights, device = self._weights, self._weights.head.device
        hidden = F.linear(work.features.to(device), weights.fuse)  # [N, hidden]
        spans = list(zip(work.slabs, work.num_kept, work.num_rows, strict=True))
        out = self._layer(hidden, torch.tensor(work.token_ids, device=device), work.positions, spans)
        last = [stop - 1 for stop in accumulate(work.num_rows)]
        hidden, positions = out[last], [work.positions[row] for row in last]
        chains: list[Chain] = [[] for _ in last]
        token_ids = torch.empty(0, dtype=torch.int64, device=device)
        for depth, count in enumerate(work.drawing):
            goes_on = [self._goes_on(chains[j], depth, work.num_drafts[j]) for j in range(count)]
            if not any(goes_on):
                break
            if depth:
                positions = [position + 1 for position in positions[:count]]
                spans = [(slab, kept + rows + depth - 1, 1) for slab, kept, rows in _first(work, count)]
                hidden = self._layer(hidden[:count], token_ids[:count], positions, spans)
            found, chances = self._draw(self._logits(hidden[:count]), work, depth)
            token_ids = found[:, 0]
            for j in (j for j in range(count) if goes_on[j]):
                before = chains[j][-1][0].chance if depth else 1.0
                own = zip(found[j].tolist(), chances[j].tolist(), strict=True)
                chains[j].append([Guess(token_id, before * chance) for token_id, chance in own if chance > 0])
        return chains

    def _goes_on(self, chain: Chain, depth: int, wanted: int) -> bool:
        if not depth:
            return True
        return len(chain) == depth and may_matter(chain, chain[-1][0].chance, wanted, self._least_chance)

    def _layer(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: list[int],
        spans: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        """The layer's output for rows [n, hidden]; each span is a slab, its first new slot, and rows."""
        weights, sizes = self._weights, self._weights.sizes
        residual = hidden
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.hidden_norm, weights.eps)
        if weights.norms_residual:
            residual = normed
        embedded = F.rms_norm(weights.embedding(token_ids), (sizes.hidden,), weights.input_norm, weights.eps)
        qkv = F.linear(torch.cat([embedded, normed], dim=-1), weights.qkv)
        hidden = residual + F.linear(self._attend(qkv, positions, spans), weights.output)
        normed = F.rms_norm(hidden, (sizes.hidden,), weights.mlp_norm, weights.eps)
        gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, weights.down)

    def _attend(
        self, qkv: torch.Tensor, positions: list[int], spans: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        of, kv = self._weights.sizes, self._kv
        heads, kv_heads, dim = of.heads, of.kv_heads, of.head_dim
        sizes = [heads, kv_heads, kv_heads]
        query, key, value = torch.split(qkv.view(len(qkv), -1, dim), sizes, dim=1)
        where = torch.tensor(positions, device=qkv.device)
        cos, sin = self._weights.rotary(qkv, position_ids=where[None])
        query, key = (_rotated(part, cos[0, :, None], sin[0, :, None]) for part in (query, key))
        attended = []
        row = 0
        for slab, first, count in spans:
            stop = first + count
            kv.keys[slab, :, first:stop] = key[row : row + count].transpose(0, 1)
            kv.values[slab, :, first:stop] = value[row : row + count].transpose(0, 1)
            begin = max(0, first + 1 - kv.window)
            slots = torch.arange(begin, stop, device=qkv.device)
            own = torch.arange(first, stop, device=qkv.device)[:, None]
            mask = (slots <= own) & (slots > own - kv.window)
            found = F.scaled_dot_product_attention(
                query[row : row + count].transpose(0, 1)[None],
                kv.keys[slab, :, begin:stop][None],
                kv.values[slab, :, begin:stop][None],
                attn_mask=mask,
                enable_gqa=True,
            )
            attended.append(found[0].transpose(0, 1).reshape(count, heads * dim))
            row += count
        return torch.cat(attended)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, (hidden.shape[-1],), self._weights.last_norm, self._weights.eps)
        return F.linear(normed, self._weights.head).float()

    def _draw(self, logits: torch.Tensor, work: EagleRound, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """GUESSES tokens for each of the first rows, the target's ids, and how likely each is, 0 for none."""
        chance, best = logits.softmax(dim=-1).topk(GUESSES, dim=-1)  # [count, GUESSES]
        if work.noise is None:
            return self._weights.token_ids[best], chance
        sampling, keys = work.noise.sampling, work.noise.keys
        rows = np.flatnonzero(sampling.temperature[: len(logits)] > 0)
        if len(rows):
            filters = Filters.of_rows(sampling, rows, logits.shape[1], logits.device)
            support = process_logits(logits[torch.from_numpy(rows)], filters)
            own_keys = keys[rows, depth].to(logits.device)
            bits = noise_bits(own_keys, self._weights.token_ids[support.token_ids])
            scores = support.scaled.double() + gumbel_of(bits)
            won = scores.topk(min(GUESSES, scores.shape[1]), dim=1)
            width = won.values.shape[1]
            at = torch.from_numpy(rows).to(logits.device)
            best[at, :width] = support.token_ids.gather(1, won.indices).long()
            chance[at] = 0.0
            drawn = torch.tensor(DRAWN_CHANCES[:width], device=logits.device)
            chance[at, :width] = torch.where(won.values.isfinite(), drawn, 0.0)
        return self._weights.token_ids[best], chance


def _first(work: EagleRound, count: int) -> list[tuple[int, int, int]]:
    """Slab, slots before, and rows read of each of the first sequences."""
    return list(zip(work.slabs[:count], work.num_kept[:count], work.num_rows[:count], strict=True))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
