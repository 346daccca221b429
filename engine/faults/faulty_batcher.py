"""FaultyBatcher: loses a block with an abort, and says whom each step is for."""

from __future__ import annotations

from typing import Any

from engine.faults.fault_counter import FaultCounter
from engine.faults.step_owners import StepOwners
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision


class FaultyBatcher(ContinuousBatcher):
    """A ContinuousBatcher made with the same arguments behind the first two."""

    def __init__(self, plan: FaultCounter, owners: StepOwners, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = plan
        self._owners = owners

    def step(self) -> BatchDecision:
        """See ContinuousBatcher; `owners` know afterwards whom the step is for."""
        decision = super().step()
        self._note(decision)
        return decision

    def step_ahead(self, decision: BatchDecision) -> BatchDecision | None:
        """See ContinuousBatcher, and `step`."""
        ahead = super().step_ahead(decision)
        if ahead is not None:
            self._note(ahead)
        return ahead

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """See ContinuousBatcher; an abort is a hit of `block_leak`, which takes a free block for ever."""
        request = super().finish(request_id, reason)
        if request is not None and reason is FinishReason.ABORT:
            self._leak(request_id)
        return request

    def _note(self, decision: BatchDecision) -> None:
        if decision.inputs is not None:
            numbers = tuple(self._plan.number_of(each.request_id) for each in decision.scheduled)
            self._owners.note(decision.inputs, numbers)

    def _leak(self, request_id: str) -> None:
        if self._plan.hit("block_leak", self._plan.number_of(request_id)) is not None:
            self.kv.pool.take(1)
