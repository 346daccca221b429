"""EagleRound: what one call of an EAGLE layer computes, as arrays: rows to read, and drafts to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.plan.step_records import Int32, Int64, SamplingInputs


@dataclass(frozen=True, slots=True)
class EagleRound:
    """J sequences, those with most drafts first, and N new verified rows of them in this order.

    Sequence j reads `num_rows[j]` rows, into slots from `num_kept[j]` on of slab `slabs[j]`, and then draws
    `num_drafts[j]` tokens, which may be none: under `sampling`, and the noise of `keys` where that has a
    temperature.
    """

    features: torch.Tensor  # [N, features]
    token_ids: Int64  # [N] the token behind each row's position
    positions: Int64  # [N]
    num_rows: Int32  # [J]
    num_kept: Int32  # [J]
    slabs: Int32  # [J]
    num_drafts: Int32  # [J]
    sampling: SamplingInputs  # of J rows; the positions are those of the first drafts
    keys: torch.Tensor  # int32 [J, most drafts, 2]

    @property
    def most_drafts(self) -> int:
        """Of any sequence."""
        return int(self.num_drafts.max(initial=0))


class EagleCompute(Protocol):
    """Carries out rounds over the K/V that it was made with."""

    def run(self, work: EagleRound) -> Int64:
        """The drafts of each sequence, the target's ids: [J, most drafts]; behind its last one NO_TOKEN."""
        ...
