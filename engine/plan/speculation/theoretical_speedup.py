"""theoretical_speedup: what speculation should gain, by formula, to hold measurements against.

All assume that each draft is accepted with the same chance alpha, whatever came before (Leviathan et al.
2023, "Fast inference from transformers via speculative decoding"), and answer in tokens per target step of
one token, so that plain decoding is 1. `cost_ratio` is the time of one draft token over that of such a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def expected_tokens(gamma: int, alpha: float) -> float:
    """Tokens that verifying `gamma` drafts commits: E = (1 - alpha^(gamma+1)) / (1 - alpha)."""
    if alpha == 1:
        return gamma + 1.0
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def theoretical_speedup(
    gamma: int, alpha: float, cost_ratio: float = 0.0, *, verify_cost: float = 1.0
) -> float:
    """Draft, then verify: E / (v + gamma c), where v is the cost of verifying over that of a plain step."""
    return expected_tokens(gamma, alpha) / (verify_cost + gamma * cost_ratio)


def chain_hit_rate(gamma: int, alpha: float) -> float:
    """Chance that what was drafted past the verified drafts holds: h = alpha^(gamma+1).

    All drafts are accepted and the drafter guessed the bonus token as well as any other.
    """
    return float(alpha ** (gamma + 1))


def outcome_hit_rate(
    gamma: int, alpha: float, num_outcomes: int, runner_up_rates: Sequence[float] = (0.7, 0.2, 0.05)
) -> float:
    """Chance that one of the `num_outcomes` likeliest results of a verification was drafted for.

    The chain itself has alpha^(gamma+1); k accepted, then the drafter's j-th runner-up, has
    alpha^k (1 - alpha) rho_j. After Kumar et al. 2026 (speculative speculative decoding).
    """
    branches = [
        alpha**accepted * (1 - alpha) * rate for accepted in range(gamma + 1) for rate in runner_up_rates
    ]
    return chain_hit_rate(gamma, alpha) + sum(heapq.nlargest(num_outcomes - 1, branches))


def waiting_speedup(
    gamma: int, alpha: float, cost_ratio: float, *, hit_rate: float | None = None, slowdown: float = 1.0
) -> float:
    """Draft ahead during verification and wait for drafts after a miss.

    E / (s + (1-h) gamma c + h max(0, gamma + 1 - m) c): `slowdown` s of the target while the drafter runs
    beside it, m = floor(1/c) drafts made meanwhile, hit rate h (None: that of one chain). Liu et al. 2024
    (PEARL).
    """
    hit = chain_hit_rate(gamma, alpha) if hit_rate is None else hit_rate
    made = int(1 / cost_ratio + 1e-9) if cost_ratio else gamma + 1
    waits = (1 - hit) * gamma + hit * max(0, gamma + 1 - made)
    return expected_tokens(gamma, alpha) / (slowdown + waits * cost_ratio)


def free_speedup(
    gamma: int,
    alpha: float,
    *,
    hit_rate: float | None = None,
    fresh_hit_rate: float | None = None,
    slowdown: float = 1.0,
) -> float:
    """Draft ahead and never wait: a step after a miss goes without drafts.

    (1 + x E) / (s (1 + x)) with x = f / (1 - h): hit rates h after a step with drafts and f after one
    without (None: those of one chain, which makes it E / (s (1 + alpha - alpha^(gamma+1)))). It holds while
    a target step lasts long enough for gamma + 1 drafts.
    """
    hit = chain_hit_rate(gamma, alpha) if hit_rate is None else hit_rate
    fresh = alpha if fresh_hit_rate is None else fresh_hit_rate
    if hit == 1:
        return expected_tokens(gamma, alpha) / slowdown
    with_drafts = fresh / (1 - hit)
    return (1 + with_drafts * expected_tokens(gamma, alpha)) / (slowdown * (1 + with_drafts))


def run_ahead_speedup(
    gamma: int, alpha: float, cost_ratio: float, *, num_outcomes: int = 1, slowdown: float = 1.0
) -> float:
    """The better of waiting and going free, with drafts for the `num_outcomes` likeliest results."""
    hit = outcome_hit_rate(gamma, alpha, num_outcomes)
    fresh = outcome_hit_rate(0, alpha, num_outcomes)
    waiting = waiting_speedup(gamma, alpha, cost_ratio, hit_rate=hit, slowdown=slowdown)
    if (gamma + 1) * cost_ratio > 1 + 1e-9:
        return waiting
    return max(waiting, free_speedup(gamma, alpha, hit_rate=hit, fresh_hit_rate=fresh, slowdown=slowdown))


def enumerated_speedup(
    hit_rate: float, hit_tokens: float, miss_tokens: float, *, draft_cost: float, backup_cost: float
) -> float:
    """Any way of drafting for several results: (h E_hit + (1-h) E_miss) / (h max(1, T_p) + (1-h)(1 + T_b)).

    `draft_cost` T_p is drafting ahead, `backup_cost` T_b drafting after a miss, both over a verification.
    Kumar et al. 2026.
    """
    tokens = hit_rate * hit_tokens + (1 - hit_rate) * miss_tokens
    return tokens / (hit_rate * max(1.0, draft_cost) + (1 - hit_rate) * (1 + backup_cost))


def lanes_speedup(gamma: int, alpha: float, cost_ratio: float, *, fixed_share: float) -> float:
    """Half the batch drafts while the other half is verified: E / (2 max(C(B/2)/C(B), gamma c)).

    `fixed_share` phi is the part of the target's step that does not shrink with the batch:
    C(b) = phi + (1 - phi) b; `cost_ratio` is for half the batch. Tang et al. 2026 (MineDraft).
    """
    half_batch = fixed_share + (1 - fixed_share) / 2
    return expected_tokens(gamma, alpha) / (2 * max(half_batch, gamma * cost_ratio))


def replicated_bound(alpha: float, cost_ratio: float) -> float:
    """What enough replicas of the target could reach: 1 / (alpha c + 1 - alpha). Timor et al. 2025 (DSI)."""
    return 1 / (alpha * cost_ratio + 1 - alpha)
