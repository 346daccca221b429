"""EagleRound: what one call of an EAGLE layer computes: rows to read, and drafts to draw."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from engine.compute.drafters.slab_rows import Span
from engine.plan.step_records import SamplingInputs

GUESSES = 3  # for each position of a chain; eagle.h has it too
# Where the position's noise draws, as eagle.h has them: the chance of what is none of the guesses, and how
# far behind the first a score does not count any longer.
OTHERS = 0.1
FAR_BEHIND = 3.0


class Guess(NamedTuple):
    """A token, and how likely it and the chain before it are to come."""

    token_id: int
    chance: float


Chain = list[list[Guess]]  # for each position its guesses, best first: the next ones follow the first of them


@dataclass(frozen=True, slots=True)
class EagleNoise:
    """How the sequences of a round draw."""

    sampling: SamplingInputs  # of J rows; the positions are those of the first drafts
    keys: torch.Tensor  # int32 [J, most drafts, 2]


@dataclass(frozen=True, slots=True)
class EagleRound:
    """J sequences, those with most drafts first, and N new verified rows of them in this order.

    Sequence j reads `num_rows[j]` rows, into slots from `num_kept[j]` on of slab `slabs[j]`, and then draws
    a chain of up to `num_drafts[j]` tokens, which may be none; it ends where nothing behind it could be among
    the sequence's best guesses, of which `num_wanted[j]` are wanted, or as likely as `least_chance`. Without
    `noise` all of them are greedy.
    The numbers are in lists, since a round has few: an operation on short arrays takes longer than a loop.
    """

    features: torch.Tensor  # [N, features]
    token_ids: list[int]  # [N] the token behind each row's position
    positions: list[int]  # [N]
    num_rows: list[int]  # [J]
    num_kept: list[int]  # [J]
    slabs: list[int]  # [J]
    num_drafts: list[int]  # [J]
    num_wanted: list[int]  # [J]
    least_chance: float = 0.0
    noise: EagleNoise | None = None

    @property
    def most_drafts(self) -> int:
        """Of any sequence."""
        return max(self.num_drafts, default=0)

    @property
    def spans(self) -> list[Span]:
        """Where the rows that are read belong, [J]."""
        return [Span(*each) for each in zip(self.slabs, self.num_kept, self.num_rows, strict=True)]

    @property
    def newest_spans(self) -> list[Span]:
        """The newest row of each, alone."""
        return [Span(slab, first + rows - 1, 1) for slab, first, rows in self.spans]

    @property
    def newest_rows(self) -> list[int]:
        """Which of the rows these are, [J]."""
        return [stop - 1 for stop in accumulate(self.num_rows)]

    @property
    def drawing(self) -> list[int]:
        """How many sequences, the first ones, want a first draft, a second, ... [most drafts]"""
        return [sum(count > depth for count in self.num_drafts) for depth in range(self.most_drafts)]


def may_matter(chain: Chain, chance: float, wanted: int, least_chance: float) -> bool:
    """Whether a guess behind one of this `chance` could be among the `wanted` best of the chain."""
    better = sum(guess.chance >= chance for guesses in chain for guess in guesses)
    return chance >= least_chance and better < wanted


class EagleCompute(Protocol):
    """Carries out rounds over the K/V that it was made with, on a GPU in the stream that is current."""

    def run(self, work: EagleRound) -> list[Chain]:
        """The guesses for each of the J sequences, the target's ids."""
        ...
