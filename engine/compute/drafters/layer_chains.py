"""LayerChains: chains of drafts from any layer that reads a target's features, in tensor operations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.compute.attention.kv_tensors import on_device
from engine.compute.drafters.eagle_round import (
    FAR_BEHIND,
    OTHERS,
    Chain,
    EagleRound,
    Guess,
    may_matter,
)
from engine.compute.drafters.slab_rows import SlabLayout, SlabRows, Span
from engine.compute.sampling.noise import gumbel_of, noise_bits
from engine.compute.sampling.processors import Filters, process_logits
from engine.compute.sampling.row_groups import in_groups


class DraftLayer(Protocol):
    """A layer that attends to K/V of its own. Rows are those of several sequences, one behind the other."""

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens that it can guess, on its device: int64 [n]."""
        ...

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What the layer takes in of the target's features [N, width]: [N, hidden]."""
        ...

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        """What leaves the layer of each sequence's newest row, [sequences, hidden].

        `token_ids` are the tokens behind the positions of `rows`, `hidden` what is taken in there. Of the
        other rows nothing but keys and values is wanted.
        """
        ...

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """What the layer takes in for the next position, of its own output."""
        ...

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Of `token_ids`, [n, tokens]."""
        ...


class Likeliest(NamedTuple):
    """What a layer says of the tokens that come next; memory that the next step may write over."""

    logits: torch.Tensor  # float32 [n, tokens]
    chances: torch.Tensor  # float32 [n, guesses], the highest first
    places: torch.Tensor  # int64 [n, guesses] of these among the tokens that the layer can guess

    @classmethod
    def of(cls, logits: torch.Tensor, num_guesses: int) -> Likeliest:
        """Of what the layer's head gives, [n, tokens]."""
        logits = logits.float()
        return cls(logits, *logits.softmax(dim=-1).topk(num_guesses, dim=-1))


class ChainSteps(Protocol):
    """Computes a layer for a round: first what there is to read, then a token of each chain at a time."""

    @property
    def layer(self) -> DraftLayer:
        """What is computed."""
        ...

    @property
    def num_guesses(self) -> int:
        """For each place of a chain, up to GUESSES."""
        ...

    def start(self, work: EagleRound) -> Likeliest:
        """Read a round's rows: what comes behind the newest of each of the J sequences."""
        ...

    def go_on(self, token_ids: torch.Tensor) -> Likeliest:
        """What comes behind these tokens [count] of the first sequences, of which the last step told."""
        ...


class EagerSteps:
    """ChainSteps whose operations are queued one by one; `lay_out` says how rows attend."""

    def __init__(self, layer: DraftLayer, lay_out: SlabLayout, num_guesses: int) -> None:
        self.layer = layer
        self.num_guesses = num_guesses
        self._lay_out = lay_out
        self._spans: list[Span] = []
        self._positions: list[int] = []
        self._out: torch.Tensor | None = None

    def start(self, work: EagleRound) -> Likeliest:
        """See ChainSteps."""
        layer, device = self.layer, self.layer.token_ids.device
        token_ids = on_device(work.token_ids, device)
        rows = self._lay_out(work.spans, work.positions)
        self._out = layer.compute(layer.read(work.features.to(device)), token_ids, rows)
        self._spans = work.newest_spans
        self._positions = [work.positions[row] for row in work.newest_rows]
        return self._likeliest()

    def go_on(self, token_ids: torch.Tensor) -> Likeliest:
        """See ChainSteps."""
        count, out = len(token_ids), self._out
        assert out is not None, "a round was started"
        self._spans = [Span(slab, first + 1, 1) for slab, first, _ in self._spans[:count]]
        self._positions = [position + 1 for position in self._positions[:count]]
        rows = self._lay_out(self._spans, self._positions)
        self._out = self.layer.compute(self.layer.again(out[:count]), token_ids, rows)
        return self._likeliest()

    def newest(self) -> torch.Tensor:
        """What left the layer in the last step, [n, hidden]."""
        assert self._out is not None, "a round was started"
        return self._out

    def _likeliest(self) -> Likeliest:
        return Likeliest.of(self.layer.logits(self.newest()), self.num_guesses)


class LayerChains:
    """An EagleCompute. `least_chance` is how likely all drafts of a chain must be for another one."""

    def __init__(self, steps: ChainSteps, least_chance: float) -> None:
        self.steps = steps  # others over the same K/V may be put here between two rounds
        self._least_chance = least_chance

    @torch.inference_mode()
    def run(self, work: EagleRound) -> list[Chain]:
        """See EagleCompute."""
        found = self.steps.start(work)
        token_ids = found.places[:, 0]  # any: those that go on are known when one does
        chains: list[Chain] = [[] for _ in work.slabs]
        least_chance = max(self._least_chance, work.least_chance)
        for depth, count in enumerate(work.drawing):
            goes_on = [
                self._goes_on(chains[j], depth, work.num_wanted[j], least_chance) for j in range(count)
            ]
            if not any(goes_on):
                break
            if depth:
                found = self.steps.go_on(token_ids[:count])
            guesses, chances = self._guesses(Likeliest(*(part[:count] for part in found)), work, depth)
            token_ids = guesses[:, 0]
            told = torch.cat([guesses.double(), chances.double()], dim=1).tolist()  # in one copy
            for j in (j for j in range(count) if goes_on[j]):
                before = chains[j][-1][0].chance if depth else 1.0
                own = zip(told[j][: len(guesses[0])], told[j][len(guesses[0]) :], strict=True)
                likely = [Guess(int(each), before * chance) for each, chance in own if chance > 0]
                if likely:  # of what is not finite nothing is
                    chains[j].append(likely)
        return chains

    @staticmethod
    def _goes_on(chain: Chain, depth: int, wanted: int, least_chance: float) -> bool:
        if not depth:
            return True
        return len(chain) == depth and may_matter(chain, chain[-1][0].chance, wanted, least_chance)

    def _guesses(self, found: Likeliest, work: EagleRound, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The guesses for each of the rows, the target's ids, and how likely each is, 0 for none."""
        token_ids = self.steps.layer.token_ids
        logits, chance, best = found
        if work.noise is None:
            return token_ids[best], chance
        sampling, keys = work.noise.sampling, work.noise.keys
        is_sick = chance[:, :1].isnan()  # where logits are not finite, on which filters would fail for all
        sampled = np.flatnonzero(sampling.temperature[: len(logits)] > 0)
        for group in in_groups(len(sampled), logits.shape[1]):
            rows = sampled[group]
            filters = Filters.of_rows(sampling, rows, logits.shape[1], logits.device)
            at = torch.from_numpy(rows).to(logits.device)
            support = process_logits(logits[at].masked_fill_(is_sick[at], 0.0), filters)
            own_keys = keys[rows, depth].to(logits.device)
            bits = noise_bits(own_keys, token_ids[support.token_ids])
            scores = support.scaled.double() + gumbel_of(bits)
            won = scores.topk(min(best.shape[1], scores.shape[1]), dim=1)
            width = won.values.shape[1]
            best[at, :width] = support.token_ids.gather(1, won.indices).long()
            chance[at] = 0.0
            # The smaller a token's lead, the likelier the target draws another: as if what the layer's logits
            # are wrong by were noise like the position's own.
            values = won.values
            values = values.masked_fill(values <= values[:, :1] - FAR_BEHIND, -torch.inf)
            chance[at, :width] = (1 - OTHERS) * values.softmax(dim=1).float()
        return token_ids[best], chance.masked_fill_(is_sick, 0.0)
