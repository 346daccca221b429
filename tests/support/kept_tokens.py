"""The tokens that borders on a device keep of their rows, by plain operations."""

from __future__ import annotations

import torch

from engine.compute.cuda.triton_border import IS_CUT, LEFT, LOW, Rows, find_borders


def kept_tokens(rows: Rows) -> torch.Tensor:
    """What top-k and then top-p keep of each row, bool [n, vocab], whatever min-p says."""
    borders = find_borders(rows).fields
    low, left, is_cut = (borders[:, field.value, None] for field in (LOW, LEFT, IS_CUT))
    best = rows.best[rows.places].float().unsqueeze(1)
    keys = (rows.logits[rows.places].float() - best).abs().view(torch.int32)
    tied = keys == low
    return (keys < low) | (tied & ((is_cut == 0) | (tied.cumsum(1) <= left)))
