"""Which experts each row goes through, and with what shares, in two launches or three."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
import triton
from torch import nn
from torch.nn import functional

from engine.compute.cuda.expert_kernels import choose_kernel, scaled_norm_kernel, three_norms_kernel
from engine.compute.cuda.expert_layout import Choice
from engine.compute.cuda.fused_norms import RowNorm, Sum, eps_of, frozen, warps_for
from engine.compute.cuda.fused_products import is_projection
from engine.compute.native.closeness import is_close
from engine.compute.native.families import (
    family_of,
    has_float_router,
    has_grouped_router,
    has_plain_router,
    rounds_shares,
)
from engine.compute.native.observation import Seen
from engine.compute.native.places import is_unhooked

_LEAST = 1e-20  # what grouped routers add to a sum that they divide by
_WARPS = 1  # a row's experts are too few for more


class FusedRouter(nn.Module):
    """A router with the weights of `original`, equal to it up to rounding and the order of equal experts.

    DeepSeek's, and those that choose by groups as its do, compute in float32: so their weights are kept.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        weight, bias = original.weight.detach(), getattr(original, "bias", None)
        is_grouped = has_grouped_router(original)
        in_floats = is_grouped or has_float_router(original)
        self.weight = frozen(weight.float() if in_floats else weight)
        self.bias = None if bias is None else frozen(bias.detach())
        self.scales = None
        self.biases = original.e_score_correction_bias.detach() if is_grouped else None
        self.choice = _grouped_choice(original) if is_grouped else _plain_choice(original)
        self.dtype = weight.dtype if not in_floats and rounds_shares(original) else torch.float32

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; what it chooses is still to be compared."""
        is_read = any(has(original) for has in (has_plain_router, has_float_router, has_grouped_router))
        return is_read and is_unhooked(original) and original.weight.dtype is dtype

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows [N, hidden] the logits [N, experts], and shares and numbers of those chosen, [N, each]."""
        rows = hidden_states.reshape(-1, self.weight.shape[1]).to(self.weight.dtype)
        logits = functional.linear(rows, self.weight, self.bias)
        shares, chosen = choose(logits, self.choice, self.dtype, self.biases)
        return logits, shares, chosen


class FusedScaledRouter(nn.Module):
    """Gemma 4's, whose rows are normed and scaled before, and whose experts' shares have a scale each."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.projection = original.proj
        self.scale = frozen(original.scale.detach())
        self.scales = frozen(original.per_expert_scale.detach())
        self.choice = Choice(len(self.scales), original.config.top_k_experts)
        self._root, self._eps = float(original.scalar_root_size), float(eps_of(original.norm))

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for one that can be computed; what it chooses is still to be compared."""
        if family_of(original) is None or type(original).__name__ != "Gemma4TextRouter":
            return False
        return (
            all(map(is_unhooked, original.modules()))
            and getattr(original.norm, "weight", None) is None
            and is_projection(original.proj, dtype)
            and original.scale.dtype is dtype
            and len(original.per_expert_scale) == original.proj.out_features
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows [N, hidden] the logits [N, experts], and shares and numbers of those chosen, [N, each]."""
        return self.chosen_for(self.scaled(hidden_states.contiguous()))

    def chosen_for(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of rows that are scaled."""
        logits = self.projection(scaled)
        return logits, *choose(logits, self.choice, torch.float32, scales=self.scales)

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by, of rows [N, hidden]."""
        normed = torch.empty_like(rows)
        count, width = rows.shape
        scaled_norm_kernel[(count,)](
            rows,
            self.scale,
            normed,
            self._root,
            self._eps,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=warps_for(width),
        )
        return normed

    def sum_and_scaled(
        self, of: Sum, by: RowNorm, other: RowNorm
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sum whose norms are known, its norms by both, and it scaled, in one launch."""
        rows, added, norm_of_added = of.rows, of.added, of.norm_of_added
        assert isinstance(added, torch.Tensor) and norm_of_added is not None, "Gemma's layers norm attention"
        count, width = rows.shape
        total, normed, other_normed, scaled = (torch.empty_like(rows) for _ in range(4))
        three_norms_kernel[(count,)](
            rows,
            added,
            *(norm.weight for norm in (norm_of_added, by, other)),
            self.scale,
            total,
            normed,
            other_normed,
            scaled,
            of.multiplier,
            self._root,
            *(norm.variance_epsilon for norm in (norm_of_added, by, other)),
            self._eps,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=warps_for(width),
        )
        return total, normed, other_normed, scaled


_Router = TypeVar("_Router", FusedRouter, FusedScaledRouter)


def router_class_of(module: Any, dtype: torch.dtype) -> type[FusedRouter] | type[FusedScaledRouter] | None:
    """What computes a router; None where nothing does."""
    return next((each for each in (FusedRouter, FusedScaledRouter) if each.fits(module, dtype)), None)


def with_shared(router: _Router, num_shared: int) -> _Router:
    """One with the same weights that tells as many more experts, whom all rows go through."""
    made = copy.copy(router)
    made.choice = replace(router.choice, num_shared=num_shared)
    return made


def choose(
    logits: torch.Tensor,
    choice: Choice,
    dtype: torch.dtype,
    biases: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of `dtype` and int64 numbers of the experts of each row, both [N, each], in one launch.

    Those that all rows go through are among them. `logits` are [N, count]. `biases` [count] count for who is
    chosen, `scales` [count] for shares.
    """
    each = choice.each + choice.num_shared
    shares = logits.new_empty((len(logits), each), dtype=dtype)
    chosen = torch.empty_like(shares, dtype=torch.int64)
    if len(logits):
        choose_kernel[(len(logits),)](
            logits,
            logits if biases is None else biases,
            logits if scales is None else scales,
            shares,
            chosen,
            CHOICE=choice,
            GROUPS=triton.next_power_of_2(choice.num_groups),
            SIZE=triton.next_power_of_2(choice.size),
            PLACES=triton.next_power_of_2(each),
            HAS_BIASES=biases is not None,
            HAS_SCALES=scales is not None,
            num_warps=_WARPS,
        )
    return shares, chosen


@torch.inference_mode()
def equal_router(original: Any, seen: Seen, dtype: torch.dtype) -> nn.Module | None:
    """The router fused; None unless it chooses as that was seen to, or experts that score the same.

    Raises whatever a compiler or driver does.
    """
    router_class = router_class_of(original, dtype)
    if router_class is None or len(seen.args) != 1 or seen.options or len(seen.output) != 3:
        return None
    made = router_class(original)
    (_, shares, chosen), (scores, expected_shares, expected) = made(*seen.args), seen.output
    if shares.dtype is not expected_shares.dtype or chosen.shape != expected.shape:
        return None
    if made.scales is not None:  # of experts that score the same they differ
        shares, expected_shares = shares / made.scales[chosen], expected_shares / made.scales[expected]
    pairs = (
        (scores.gather(1, chosen), scores.gather(1, expected)),
        (shares, expected_shares),
    )
    return made if all(is_close(*(each.sort(1).values for each in pair)) for pair in pairs) else None


def _plain_choice(router: Any) -> Choice:
    count, each = len(router.weight), router.top_k
    if has_float_router(router):
        return Choice(count, each, is_normed=False, factor=float(router.routed_scaling_factor))
    return Choice(count, each, is_normed=bool(getattr(router, "norm_topk_prob", True)))


def _grouped_choice(router: Any) -> Choice:
    return Choice(
        len(router.weight),
        router.top_k,
        is_normed=bool(router.norm_topk_prob),
        by_sigmoid=True,
        num_groups=router.num_group,
        kept_groups=router.topk_group,
        least=_LEAST,
        factor=float(router.routed_scaling_factor),
    )
