"""FaultyEngine: an engine whose parts go wrong by plan; it knows which request is which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

from config import PlannedFault
from engine.faults.fault_counter import PREPARING, FaultCounter
from engine.faults.faulty_ahead_runner import make_faulty
from engine.faults.faulty_batcher import FaultyBatcher
from engine.faults.faulty_drafter import FaultyDrafter
from engine.faults.faulty_sampler import FaultySampler
from engine.faults.faulty_text import FaultyDetokenizer, FaultyTokenizer
from engine.faults.step_owners import StepOwners
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineLimits, EngineParts, Executors
from engine.loop.stream import RequestStream
from engine.plan.request import GenerationRequest
from engine.startup.part_factories import PartFactories


class FaultyEngine(Engine):
    """An Engine whose parts `load` makes with faulty factories."""

    def __init__(
        self,
        faults: Iterable[PlannedFault],
        load: Callable[[PartFactories], EngineParts | None],
        limits: EngineLimits | None = None,
        executors: Executors | None = None,
    ) -> None:
        plan = self._plan = FaultCounter(faults)
        super().__init__(lambda: load(faulty_factories(plan)), limits, executors=executors)

    def admit(self, num_requests: int, tenant: str | None = None, priority: int = 0) -> ExitStack:
        """See Engine. What the calling task has tokenized from here on is for the request that is to come."""
        num_before = self._plan.num_arrivals + self._admission.num_preparing
        permit = super().admit(num_requests, tenant, priority)
        PREPARING.set(num_before + 1)
        return permit

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[RequestStream]:
        """See Engine. Accepted requests are numbered."""
        group = requests[0].group or requests[0].request_id
        PREPARING.set(self._plan.number_for(group))
        streams = super().submit_all(requests)
        for stream in streams:
            self._plan.arrive(stream.request_id, group)
        return streams


def faulty_factories(plan: FaultCounter) -> PartFactories:
    """Parts in which the faults of `plan` happen; for one engine."""
    owners = StepOwners()
    return PartFactories(
        tokenizer=partial(FaultyTokenizer, plan),
        detokenizer=partial(FaultyDetokenizer, plan),
        sampler=FaultySampler,
        runner=partial(make_faulty, plan, owners),
        drafter=partial(FaultyDrafter, plan),
        batcher=partial(FaultyBatcher, plan, owners),
    )
