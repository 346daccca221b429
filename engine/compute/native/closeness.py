"""Whether two ways to compute the same rows differ by no more than rounding."""

from __future__ import annotations

import torch

# By how much of its length a row may differ: half of them, and any one. Rounding to bfloat16 makes 0.003,
# attention's roundings together up to 0.02 in few rows; a scale that is ten percent off makes 0.1.
LIMITS = {torch.bfloat16: (0.02, 0.08), torch.float16: (0.003, 0.02), torch.float32: (1e-4, 1e-3)}


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True for rows that differ by no more than rounding; never where something is not finite."""
    if found.shape != expected.shape or not (found.isfinite().all() and expected.isfinite().all()):
        return False
    rows, expected_rows = (tensor.float().flatten(0, -2) for tensor in (found, expected))  # [rows, width]
    lengths = expected_rows.norm(dim=-1)
    distances = (rows - expected_rows).norm(dim=-1)
    if distances[lengths == 0].any():
        return False
    parts = distances[lengths > 0] / lengths[lengths > 0]
    typical, largest = LIMITS[expected.dtype]
    return not len(parts) or bool(parts.median() <= typical and parts.max() <= largest)
