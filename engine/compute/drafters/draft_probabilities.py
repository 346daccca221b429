"""check_probabilities: refuses what cannot be the probabilities that drafts were drawn with."""

from __future__ import annotations

import torch

from engine.compute.runner.device import idle_stream, in_stream
from engine.plan.speculation.drafter import DraftResult

_MOST_PROBABLE = 1.001  # rounding included


def check_probabilities(result: DraftResult, vocab_size: int) -> None:
    """Raise ValueError unless each draft's `probs` are float32 [vocab_size] in [0, 1].

    Verification computes with them for all requests of a step at once, so one bad row would spoil the others.
    On a GPU they are there by now: they are looked at beside the target's pass, and not behind it.
    """
    given: list[torch.Tensor] = []
    for draft in result.drafts:
        for probs in draft.probs:
            wanted = torch.float32, (vocab_size,)
            if not isinstance(probs, torch.Tensor) or (probs.dtype, probs.shape) != wanted:
                raise ValueError(f"a draft's distribution is no float32 vector of {vocab_size}")
            given.append(probs)
    if not given:
        return
    with in_stream(idle_stream(given[0].device)):
        ends = torch.stack([end for probs in given for end in probs.aminmax()])  # NaN stays NaN, and fails
        if not bool(((ends >= 0) & (ends < _MOST_PROBABLE)).all()):
            raise ValueError("a draft's distribution holds what is no probability")
