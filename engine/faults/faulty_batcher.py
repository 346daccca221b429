"""FaultyBatcher: loses a block with an abort, and says whose step is next."""

from __future__ import annotations

from typing import Any

from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_runner import Flight
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision


class FaultyBatcher(ContinuousBatcher):
    """A ContinuousBatcher made with the same arguments behind the first two."""

    def __init__(self, plan: FaultCounter, flight: Flight, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = plan
        self._flight = flight

    def step(self) -> BatchDecision:
        """See ContinuousBatcher; `flight` knows afterwards whom the step is for."""
        decision = super().step()
        self._flight.numbers = [
            self._plan.number_of(scheduled.request_id) for scheduled in decision.scheduled
        ]
        return decision

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """See ContinuousBatcher; an abort is a hit of `block_leak`, which takes a free block for ever."""
        request = super().finish(request_id, reason)
        if request is not None and reason is FinishReason.ABORT:
            self._leak(request_id)
        return request

    def _leak(self, request_id: str) -> None:
        if self._plan.hit("block_leak", self._plan.number_of(request_id)) is not None:
            self.kv.pool.take(1)
