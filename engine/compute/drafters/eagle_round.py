"""EagleRound: what one call of an EAGLE layer computes: rows to read, and drafts to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.plan.step_records import SamplingInputs


@dataclass(frozen=True, slots=True)
class EagleNoise:
    """How the sequences of a round draw."""

    sampling: SamplingInputs  # of J rows; the positions are those of the first drafts
    keys: torch.Tensor  # int32 [J, most drafts, 2]


@dataclass(frozen=True, slots=True)
class EagleRound:
    """J sequences, those with most drafts first, and N new verified rows of them in this order.

    Sequence j reads `num_rows[j]` rows, into slots from `num_kept[j]` on of slab `slabs[j]`, and then draws
    `num_drafts[j]` tokens, which may be none. Without `noise` all of them are greedy. The numbers are in
    lists, since a round has few: an operation on short arrays takes longer than a loop.
    """

    features: torch.Tensor  # [N, features]
    token_ids: list[int]  # [N] the token behind each row's position
    positions: list[int]  # [N]
    num_rows: list[int]  # [J]
    num_kept: list[int]  # [J]
    slabs: list[int]  # [J]
    num_drafts: list[int]  # [J]
    noise: EagleNoise | None = None

    @property
    def most_drafts(self) -> int:
        """Of any sequence."""
        return max(self.num_drafts, default=0)

    @property
    def drawing(self) -> list[int]:
        """How many sequences, the first ones, want a first draft, a second, ... [most drafts]"""
        return [sum(count > depth for count in self.num_drafts) for depth in range(self.most_drafts)]


class EagleCompute(Protocol):
    """Carries out rounds over the K/V that it was made with."""

    def run(self, work: EagleRound) -> list[list[int]]:
        """The drafts of each of the J sequences, the target's ids; fewer where a chain ends before."""
        ...
