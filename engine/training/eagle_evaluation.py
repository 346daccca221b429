"""How good a drafter of one layer is on answers it has not seen: how many guesses in a row come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.compute.drafters.eagle_layer import EagleLayer
from engine.compute.drafters.medusa import couple
from engine.training.eagle_chain import TrainedChain
from engine.training.eagle_features import Example
from engine.training.eagle_training import Batch
from engine.training.training_plan import TrainingProgress

DEPTH = 6  # guesses in a row


@dataclass(frozen=True, slots=True)
class Guesses:
    """What came of chains of DEPTH drafts after every token of some answers that has as many behind it.

    `right[d]` is how often guess d + 1 was right where those before it were; `accepted[d]` is how many drafts
    verification takes of a chain of d + 1, on average.
    """

    num_chains: int
    right: tuple[float, ...]
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Guesses by kind of request: "greedy", and "T 0.7" and so on for those that sample, with coupled draws.

    `coverage` is the share of answers' tokens that can be guessed at all, among `num_tokens`.
    """

    num_tokens: int
    coverage: float
    guesses: dict[str, Guesses]


@torch.inference_mode()
def evaluate_layer(layer: EagleLayer, examples: Sequence[Example], progress: TrainingProgress) -> Evaluation:
    """Judge the layer on every answer; it is left as it is."""
    held: dict[float, list[torch.Tensor]] = {}
    for number, example in enumerate(examples, 1):
        held.setdefault(example.sample.temperature, []).append(num_right(layer, example))
        progress.update("evaluate", number, len(examples), f"{number} answers")
    token_ids = torch.cat([example.sample.token_ids for example in examples])
    known = torch.isin(token_ids.long(), layer.token_ids.cpu())
    kinds = {
        "greedy" if each == 0 else f"T {each:g}": torch.cat(found) for each, found in sorted(held.items())
    }
    guesses = {name: _summed_up(found) for name, found in kinds.items() if len(found)}
    return Evaluation(len(token_ids), float(known.float().mean()), guesses)


def num_right(layer: EagleLayer, example: Example) -> torch.Tensor:
    """How many of DEPTH guesses in a row are right after each token of the answer: int64 [chains].

    Chain i drafts after token i of the answer, as the drafter does: from the features behind that token. The
    tokens it goes on from are those that came, since the first wrong one ends it.
    """
    batch, sample = Batch([example]), example.sample
    first, num_chains = sample.first_position, example.num_answered - DEPTH
    if num_chains < 1:
        return torch.zeros(0, dtype=torch.long)
    device = layer.token_ids.device
    features = batch.features(layer).to(device, layer.fc.weight.dtype)
    chain = TrainedChain(layer, features, batch.token_ids.to(device))
    holds = torch.ones(num_chains, dtype=torch.bool)
    count = torch.zeros(num_chains, dtype=torch.long)
    for step in range(DEPTH):
        # Row first - 1 has the features that drew the answer's first token.
        output = chain.step()[0, first - 1 : first - 1 + num_chains]
        scores = layer.logits(output).float()
        if sample.temperature > 0:
            scores = _coupled(layer, sample.temperature, sample.seed, first + 1 + step, scores)
        drafts = layer.token_ids[scores.argmax(-1)].cpu()
        came = example.token_ids[first + 1 + step :][:num_chains]
        holds &= drafts == came
        count += holds
    return count


def _coupled(
    layer: EagleLayer, temperature: float, seed: int, position: int, scores: torch.Tensor
) -> torch.Tensor:
    """The scores of rows that draw at `position` and so on, under the noise with which the target draws."""
    count = len(scores)
    first = np.arange(position, position + count, dtype=np.int64)
    temperatures, seeds = np.full(count, temperature), np.full(count, seed, dtype=np.int64)
    return couple(scores[:, None], layer.token_ids, temperatures, seeds, first)[:, 0]


def _summed_up(counts: torch.Tensor) -> Guesses:
    reached = [int((counts >= depth).sum()) for depth in range(DEPTH + 1)]
    right = tuple(reached[depth + 1] / max(1, reached[depth]) for depth in range(DEPTH))
    accepted = tuple(float(counts.clamp(max=depth).float().mean()) for depth in range(1, DEPTH + 1))
    return Guesses(len(counts), right, accepted)
