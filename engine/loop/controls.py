"""Controls: what those who run a server, or own a request, may ask and change while requests are open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from engine.errors import InvalidRequest
from engine.loop.engine_parts import EngineParts
from engine.loop.open_requests import OpenRequests
from engine.loop.time_limits import TimeLimits
from engine.plan.scheduling.explanation import RequestExplanation
from engine.plan.speculation.drafting_state import DraftingState
from engine.plan.speculation.speculation_config import DraftingChange

log = logging.getLogger("slipstream.engine")


@dataclass(frozen=True, slots=True)
class Controls:
    """Explains open requests and changes them, drafting and the prefix cache. Loop thread only."""

    _requests: OpenRequests
    _time_limits: TimeLimits
    _clock: Callable[[], float]
    _loaded: Callable[[], EngineParts]  # raises what the engine does before the load
    _drafting: Callable[[], DraftingState | None]

    def explain(self, request_id: str) -> RequestExplanation | None:
        """How an open request stands, its preemptions dated in seconds ago; None when there is none."""
        found = self._loaded().batcher.explain(request_id) if request_id in self._requests else None
        if found is None:
            return None
        now, state = self._clock(), self._drafting()
        preemptions = tuple((now - at, mode) for at, mode in found.preemptions)
        drafting = found.drafting if state is None else found.drafting.within(state)
        return replace(found, preemptions=preemptions, drafting=drafting)

    def reprioritize(
        self, request_id: str, *, priority: int | None = None, deadline_s: float | None = None
    ) -> bool:
        """Rank an open request anew; False when there is no such request any more.

        None leaves the old value. `deadline_s` counts from the arrival; one that has passed ends it at once.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        deadline = None if deadline_s is None else request.arrival_time + deadline_s
        self._loaded().batcher.reprioritize(request_id, priority=priority, deadline=deadline)
        self._time_limits.watch(request)
        return True

    def retune(self, request_id: str, change: DraftingChange) -> bool:
        """Draft for an open request in another way, from the next step on; False when there is no such one.

        It changes the speed only: no token is another for it.
        """
        return request_id in self._requests and self._loaded().batcher.retune(request_id, change)

    def change_drafting(self, change: DraftingChange) -> None:
        """Draft in another way for all requests, from the next step on; no token is another for it.

        What a request asks for itself still holds, within the server's limit. Raises InvalidRequest where
        nothing can be drafted, Overloaded (loading).
        """
        decoder = self._loaded().batcher.decoder
        if decoder.why_never is not None:
            raise InvalidRequest(decoder.why_never, param="speculation")
        decoder.change_rules(change)
        log.info("drafting has been changed for all requests", extra=asdict(decoder.rules))

    def tenant_shares(self) -> dict[str, float]:
        """Each tenant's share of recent tokens; a bounded number of tenants by name."""
        return self._requests.shares.shares()

    def reset_prefix_cache(self, owner: str | None = None) -> int:
        """Forget each cached block of `owner` (None: of all) that no request uses; how many they were.

        What is stored of them elsewhere is deleted, and not counted.
        """
        parts = self._loaded()
        if parts.prefix_store is not None:
            parts.prefix_store.forget(owner)
        return parts.batcher.kv.prefixes.reset(owner)
