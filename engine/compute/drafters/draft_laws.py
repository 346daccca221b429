"""check_laws: could what drafts are said to be drawn from be probabilities at all?"""

from __future__ import annotations

import torch

from engine.plan.speculation.drafter import DraftResult

_MOST_PROBABLE = 1.001  # rounding included


def check_laws(result: DraftResult, vocab_size: int) -> None:
    """ValueError unless what drafts are said to be drawn from could be that.

    Verification computes with it for all requests of a step, and garbage would not stay with its own.
    """
    laws = [law for draft in result.drafts for law in draft.probs]
    bounds: list[torch.Tensor] = []
    for law in laws:
        if not isinstance(law, torch.Tensor) or (law.dtype, law.shape) != (torch.float32, (vocab_size,)):
            raise ValueError(f"a draft's distribution is no float32 vector of {vocab_size}")
        bounds += law.aminmax()  # which pass NaN on, and that fails all comparisons
    if bounds:
        ends = torch.stack(bounds)
        if not bool(((ends >= 0) & (ends < _MOST_PROBABLE)).all()):
            raise ValueError("a draft's distribution holds what is no probability")
