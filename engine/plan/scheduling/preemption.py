"""PreemptionPolicy: who gives way when blocks run out, and what becomes of its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.cost_model import CostModel
from engine.plan.scheduling.policy import PolicyKey

MODES = ("auto", "recompute", "swap")


class SwapCost(Protocol):
    """Knows from measured rates what preemption costs."""

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """True if moving `num_blocks` out and in takes less time than computing `num_tokens` again."""
        ...


class MeasuredSwapCost:
    """Compares what computing took lately with what copying `block_bytes` a block, both ways, did.

    As long as nothing has been copied, copying is tried: that is how its rate becomes known.
    """

    def __init__(self, costs: CostModel, block_bytes: int) -> None:
        self._costs = costs
        self._block_bytes = block_bytes

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """False as long as nobody knows what computing takes."""
        compute_s = self._costs.prefill_s(num_tokens)
        swap_s = self._costs.swap_s(2 * num_blocks * self._block_bytes)
        return compute_s is not None and (swap_s is None or swap_s < compute_s)


class PreemptionPolicy:
    """`recompute` throws KV away, `swap` moves it to the host while there is room, `auto` takes the cheaper.

    The oldest running request is never preempted, and nobody more than `max_preemptions` times: a request
    that was is *spent*. It is seated again only with blocks for all it may ever need, and keeps them whatever
    is drafted for it, so that it never asks for more. If the oldest runs out of blocks beside none but spent
    requests it misses steps until one of them, which all advance, has ended: work always goes on.
    """

    def __init__(
        self, mode: str = "recompute", max_preemptions: int = 8, cost: SwapCost | None = None
    ) -> None:
        if mode not in MODES:
            raise StartRefused(f"preemption {mode!r} is not available: choose one of {', '.join(MODES)}")
        self._mode = mode
        self._max_preemptions = max_preemptions
        self._cost = cost

    def is_spent(self, request: Request) -> bool:
        """True if this request must not be preempted any more."""
        return request.num_preemptions >= self._max_preemptions

    def victim(
        self, running: Iterable[Request], oldest: Request, key: Callable[[Request], PolicyKey]
    ) -> Request | None:
        """Whom to preempt: the last by policy; None when nobody may be."""
        candidates = (request for request in running if request is not oldest and not self.is_spent(request))
        return max(candidates, key=key, default=None)

    def swaps(self, num_tokens: int, num_blocks: int, num_free_host_blocks: int) -> bool:
        """Whether KV of `num_tokens` in `num_blocks` should go to the host; `auto` needs a cost to know."""
        if self._mode == "recompute" or num_tokens == 0 or num_blocks > num_free_host_blocks:
            return False
        if self._mode == "swap":
            return True
        return self._cost is not None and self._cost.swap_is_cheaper(num_tokens, num_blocks)
