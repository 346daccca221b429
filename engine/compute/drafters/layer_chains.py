"""LayerChains: chains of drafts from any layer that reads a target's features, in tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.compute.drafters.eagle_kv import Span, last_rows
from engine.compute.drafters.eagle_round import (
    FAR_BEHIND,
    GUESSES,
    OTHERS,
    Chain,
    EagleRound,
    Guess,
    may_matter,
)
from engine.compute.sampling.noise import gumbel_of, noise_bits
from engine.compute.sampling.processors import Filters, process_logits
from engine.compute.sampling.row_groups import in_groups


class DraftLayer(Protocol):
    """A layer with K/V of its own. Rows are those of several sequences, one behind the other."""

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens that it can guess, on its device: int64 [n]."""
        ...

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What the layer takes in of the target's features [N, width]: [N, hidden]."""
        ...

    def compute(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """What leaves the layer of each span's last row, [spans, hidden].

        The rows of `hidden` are at `positions`, `token_ids` are the tokens behind them. Of the others nothing
        but keys and values is wanted.
        """
        ...

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """What the layer takes in for the next position, of its own output."""
        ...

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Of `token_ids`, [n, tokens]."""
        ...


class LayerChains:
    """An EagleCompute. `least_chance` is how likely all drafts of a chain must be for another one.

    Each place has `num_guesses`, up to GUESSES.
    """

    def __init__(self, layer: DraftLayer, least_chance: float, num_guesses: int = GUESSES) -> None:
        self._layer = layer
        self._least_chance = least_chance
        self._num_guesses = num_guesses

    @torch.inference_mode()
    def run(self, work: EagleRound) -> list[Chain]:
        """See EagleCompute."""
        layer, device = self._layer, self._layer.token_ids.device
        spans = [Span(*each) for each in zip(work.slabs, work.num_kept, work.num_rows, strict=True)]
        token_ids = torch.tensor(work.token_ids, device=device)
        out = layer.compute(layer.read(work.features.to(device)), token_ids, work.positions, spans)
        positions = [work.positions[row] for row in last_rows(spans)]
        chains: list[Chain] = [[] for _ in spans]
        least_chance = max(self._least_chance, work.least_chance)
        for depth, count in enumerate(work.drawing):
            goes_on = [
                self._goes_on(chains[j], depth, work.num_wanted[j], least_chance) for j in range(count)
            ]
            if not any(goes_on):
                break
            if depth:
                positions = [position + 1 for position in positions[:count]]
                spans = [Span(slab, kept + rows + depth - 1, 1) for slab, kept, rows in _first(work, count)]
                out = layer.compute(layer.again(out[:count]), token_ids[:count], positions, spans)
            found, chances = self._draw(layer.logits(out[:count]).float(), work, depth)
            token_ids = found[:, 0]
            for j in (j for j in range(count) if goes_on[j]):
                before = chains[j][-1][0].chance if depth else 1.0
                own = zip(found[j].tolist(), chances[j].tolist(), strict=True)
                chains[j].append([Guess(token_id, before * chance) for token_id, chance in own if chance > 0])
        return chains

    @staticmethod
    def _goes_on(chain: Chain, depth: int, wanted: int, least_chance: float) -> bool:
        if not depth:
            return True
        return len(chain) == depth and may_matter(chain, chain[-1][0].chance, wanted, least_chance)

    def _draw(self, logits: torch.Tensor, work: EagleRound, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The guesses for each of the first rows, the target's ids, and how likely each is, 0 for none."""
        chance, best = logits.softmax(dim=-1).topk(self._num_guesses, dim=-1)  # [count, guesses]
        if work.noise is None:
            return self._layer.token_ids[best], chance
        sampling, keys = work.noise.sampling, work.noise.keys
        sampled = np.flatnonzero(sampling.temperature[: len(logits)] > 0)
        for group in in_groups(len(sampled), logits.shape[1]):
            rows = sampled[group]
            filters = Filters.of_rows(sampling, rows, logits.shape[1], logits.device)
            support = process_logits(logits[torch.from_numpy(rows)], filters)
            own_keys = keys[rows, depth].to(logits.device)
            bits = noise_bits(own_keys, self._layer.token_ids[support.token_ids])
            scores = support.scaled.double() + gumbel_of(bits)
            won = scores.topk(min(self._num_guesses, scores.shape[1]), dim=1)
            width = won.values.shape[1]
            at = torch.from_numpy(rows).to(logits.device)
            best[at, :width] = support.token_ids.gather(1, won.indices).long()
            chance[at] = 0.0
            # The smaller a token's lead, the likelier the target draws another: as if what the layer's logits
            # are wrong by were noise like the position's own.
            values = won.values
            values = values.masked_fill(values <= values[:, :1] - FAR_BEHIND, -torch.inf)
            chance[at, :width] = (1 - OTHERS) * values.softmax(dim=1).float()
        return self._layer.token_ids[best], chance


def _first(work: EagleRound, count: int) -> list[tuple[int, int, int]]:
    """Slab, slots before, and rows read of each of the first sequences."""
    return list(zip(work.slabs[:count], work.num_kept[:count], work.num_rows[:count], strict=True))
