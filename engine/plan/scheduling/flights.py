"""Flights: the steps that were decided and have not landed, and who has ended meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from engine.plan.request import FinishReason
from engine.plan.scheduling.step_inputs import BlockMoves, Cargo
from engine.plan.step_records import BatchDecision, SampledRows


@dataclass(frozen=True)
class Flight:
    """One step: the order, what it carries in that order, and the blocks that it moves."""

    decision: BatchDecision
    cargo: list[Cargo]
    moves: BlockMoves

    @cached_property
    def request_ids(self) -> frozenset[str]:
        """Those that it computes for."""
        return frozenset(item.scheduled.request_id for item in self.cargo)

    def rows(self) -> dict[str, int]:
        """The first row of logits of each request that samples."""
        rows: dict[str, int] = {}
        row = 0
        for item in self.cargo:
            if item.scheduled.samples:
                rows[item.scheduled.request_id] = row
                row += item.scheduled.num_drafts + 1
        return rows

    def found_good(self, drawn: SampledRows) -> set[str]:
        """Those that a token had ended before this step landed, for whom it drew a good row all the same.

        So all that they hold is good, as it is where a row is drawn for those that go on.
        """
        errors, rows = drawn.row_errors or {}, self.rows()
        return {
            request.request_id
            for (_, _, _, samples, num_drafts), request, *_ in self.cargo
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            and samples
            and not num_drafts
            and rows[request.request_id] not in errors
        }


class Flights:
    """Steps in the air, in their order. A request that ends keeps its blocks while one of them carries it.

    The device may still write there. Plan tier; loop thread only.
    """

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self._leaving: list[str] = []  # in the order in which they ended

    def __len__(self) -> int:
        return len(self._flights)

    def take_off(self, flight: Flight) -> None:
        """One more, behind the others."""
        self._flights.append(flight)

    def carry(self, request_id: str) -> bool:
        """True if one of them computes for this request."""
        return any(request_id in flight.request_ids for flight in self._flights)

    def keep(self, request_id: str) -> None:
        """A request that they carry has ended: `take_left` gives it back when none does any more."""
        self._leaving.append(request_id)

    def oldest(self, decision: BatchDecision) -> Flight:
        """The flight of this decision, which must be the next to land."""
        assert self._flights and self._flights[0].decision is decision, (
            "this decision is not the one in flight"
        )
        return self._flights[0]

    def land(self, decision: BatchDecision) -> Flight:
        """The oldest is over."""
        flight = self.oldest(decision)
        self._flights.popleft()
        return flight

    def land_all(self) -> list[Flight]:
        """All are over."""
        flights = list(self._flights)
        self._flights.clear()
        return flights

    def take_left(self) -> list[str]:
        """The requests that ended and that no flight carries any more; each is given once."""
        left = [request_id for request_id in self._leaving if not self.carry(request_id)]
        if left:
            self._leaving = [request_id for request_id in self._leaving if request_id not in left]
        return left
