"""How likely a draft is accepted, and what replaces a refused one, as pure functions of probabilities.

`p` is the target's processed distribution and `q` the one a draft was drawn from, all on the token for a
certain draft; everything is float64 and nothing here draws. A round commits the accepted drafts and one more
token. These tokens are distributed as if each was drawn from `p`, whatever `q` is.
"""

from __future__ import annotations

import torch


def accept_chance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """min(1, p/q): the chance that a draft with these probabilities is accepted, of any shape.

    Leviathan, Kalman, Matias 2023; Chen et al. 2023. A draft that `q` could not give is refused.
    """
    return torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)


def residual(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """What follows a refused draft: max(weight * p - q, 0) over its sum, [n, vocab]; `weight` [n], 1 if None.

    In a tree it is what the next sibling is held against (Miao et al. 2023). Where rounding leaves nothing,
    which a refusal has next to no chance of, it is `p`.
    """
    excess = (p if weight is None else p * weight.unsqueeze(1)).sub(q).clamp_(min=0.0)
    total = excess.sum(dim=1, keepdim=True)
    return torch.where(total > 0, excess.div_(total), p)


def block_weights(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """How much of each prefix's chance under q is backed by p: w_0 = 1, w_i = min(w_{i-1} p_i / q_i, 1).

    `p` and `q` [n, g] belong to the drafts of n chains, in order; the result is [n, g + 1]. This, and the two
    functions below, is block verification (Sun et al. 2024), which accepts at least as many drafts.
    """
    ratios = torch.where(q > 0, p / q, 0.0)
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    return torch.stack(weights, dim=1)


def block_chance(weight: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chance that a prefix which is not the whole block is accepted, [n].

    `weight` [n] is the prefix's, `p` and `q` [n, vocab] the distributions of the token after it. The
    whole block's chance is its weight.
    """
    excess = (p * weight.unsqueeze(1)).sub_(q).clamp_(min=0.0).sum(dim=1)
    total = excess + (1.0 - weight)
    return torch.where(total > 0, excess / total, 1.0)
