"""theoretical_speedup: the gain of speculation by formula, to compare measurements with.

The formulas assume that each draft is accepted with the same chance alpha, whatever came before (Leviathan et
al. 2023, "Fast inference from transformers via speculative decoding"). They give tokens per plain target
step, so plain decoding is 1. `gamma` may be a mean. `cost_ratio` c is the time of one draft token over
that of a plain step.
"""

from __future__ import annotations


def expected_tokens(gamma: float, alpha: float) -> float:
    """Tokens that verifying `gamma` drafts commits: E = (1 - alpha^(gamma+1)) / (1 - alpha)."""
    if alpha == 1:
        return gamma + 1.0
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def theoretical_speedup(
    gamma: float, alpha: float, cost_ratio: float = 0.0, *, verify_cost: float = 1.0
) -> float:
    """Draft, then verify: E / (v + gamma c), where v is the cost of verifying over that of a plain step."""
    return expected_tokens(gamma, alpha) / (verify_cost + gamma * cost_ratio)
