"""PreemptionPolicy: which request gives way when blocks run out, and what becomes of its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.errors import StartRefused
from engine.plan.request import Request
from engine.plan.scheduling.policy import PolicyKey
from engine.plan.scheduling.service_rates import ServiceRates

MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """`recompute` drops KV, `swap` moves it to the host while there is room, `auto` takes the cheaper.

    The oldest running request is never preempted, and no request more than `max_preemptions` times: it is
    *spent* then. A spent request is admitted only with blocks for all it may ever need, and keeps them
    whatever is drafted for it. If only spent requests run beside the oldest and it runs out of blocks, it
    misses steps until one of them, which all advance, has ended: work always goes on.
    """

    mode: str = "recompute"
    max_preemptions: int = 8
    rates: ServiceRates | None = None
    block_bytes: int = 0
    state_bytes: int = 0  # of what a request has beside its blocks

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise StartRefused(f"preemption {self.mode!r} is not available: choose one of {', '.join(MODES)}")

    def is_spent(self, request: Request) -> bool:
        """True if this request must not be preempted any more."""
        return request.num_preemptions >= self.max_preemptions

    def victim(
        self, running: Iterable[Request], oldest: Request, key: Callable[[Request], PolicyKey]
    ) -> Request | None:
        """The request to preempt: the last by policy; None if none may be preempted."""
        candidates = (request for request in running if request is not oldest and not self.is_spent(request))
        return max(candidates, key=key, default=None)

    def swaps(self, num_tokens: int, num_blocks: int, *, has_room: bool) -> bool:
        """Whether KV of `num_tokens` in `num_blocks` should go to the host, if that `has_room` for it."""
        if self.mode == "recompute" or num_tokens == 0 or not has_room:
            return False
        if self.mode == "swap" or self.rates is None:
            return self.mode == "swap"
        return self.rates.swap_is_cheaper(num_tokens, num_blocks * self.block_bytes + self.state_bytes)
