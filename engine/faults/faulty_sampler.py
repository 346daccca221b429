"""FaultySampler: fails as a whole because of single rows."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import SampledRows, SamplingInputs

CURSED: Final = int(np.iinfo(np.int32).min)  # as the top-k of a row


class FaultySampler(Sampler):
    """A Sampler that raises for any batch with a cursed row in it, as long as the row is in it."""

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledRows:
        """See Sampler."""
        _refuse_cursed(inputs)
        return super().sample(logits, inputs)

    def probs(self, logits: torch.Tensor, inputs: SamplingInputs) -> tuple[torch.Tensor, dict[int, str]]:
        """See Sampler."""
        _refuse_cursed(inputs)
        return super().probs(logits, inputs)


def _refuse_cursed(inputs: SamplingInputs) -> None:
    if (inputs.top_k == CURSED).any():
        raise RuntimeError("the fault plan has the sampler fail")
