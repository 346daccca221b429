"""DraftLanes: what a draft model drafts for outcomes of a verification other than the likeliest.

While the target verifies, the drafter goes on behind its own drafts, which is of use only where all of them
come true. A lane follows a sequence to one of these and the drafter's second choice behind it instead (as in
Kumar, Dao, May 2026, "Speculative speculative decoding"). It lasts as long as the verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.compute.drafters.draft_kv import DraftKv
from engine.compute.drafters.draft_sequence import DraftSequence, depends_on_newest_only, has_ended
from engine.plan.speculation.drafter import DraftJob, Lane


@dataclass(slots=True)
class DraftLane:
    """One outcome, as a sequence with K/V of its own: up to `position` that of the request's."""

    lane_id: str
    position: int  # of the second choice
    sequence: DraftSequence
    seconds: dict[int, int] = field(default_factory=dict)  # as a round's, behind `position`

    @property
    def length(self) -> int:
        """Known tokens, of which the newest is not computed yet."""
        return len(self.sequence.token_ids)

    def came(self, job: DraftJob) -> bool:
        """True if the job's tokens are this outcome and drafts of the lane behind it."""
        tokens = job.token_ids[self.position - job.first :]
        return self.position >= job.first and tokens == self.answer.token_ids[: len(tokens)] != ()

    @property
    def answer(self) -> Lane:
        """What it came to."""
        return Lane(self.position, tuple(self.sequence.token_ids[self.position :]))


@dataclass(slots=True)
class _Round:
    """One request between two commits."""

    num_committed: int
    seconds: dict[int, int] = field(default_factory=dict)  # the second choice at each drafted position
    lanes: list[DraftLane] = field(default_factory=list)


class DraftLanes:
    """The lanes of all sequences. They take blocks from none: where no block is free, lanes are fewer."""

    def __init__(self, kv: DraftKv, max_model_len: int) -> None:
        self._kv = kv
        self._max_model_len = max_model_len
        self._rounds: dict[str, _Round] = {}

    def begin(self, job: DraftJob, num_equal: int) -> None:
        """A job came whose first `num_equal` tokens were known: lanes of an older round end."""
        if not job.num_lanes:
            self.drop(job.request.request_id)
            return
        state = self._rounds.setdefault(job.request.request_id, _Round(job.num_committed))
        if state.num_committed != job.num_committed or num_equal < job.next_position:
            seconds = {at: token for at, token in state.seconds.items() if at < num_equal}
            for lane in state.lanes:
                if lane.position == num_equal and lane.came(job):
                    seconds |= {at: token for at, token in lane.seconds.items() if at < job.next_position}
            self._end(state)
            state.num_committed, state.seconds = job.num_committed, seconds

    def note_second(self, request_id: str, position: int, token_id: int) -> None:
        """The second choice for a token that was drafted."""
        self._rounds[request_id].seconds[position] = token_id

    def growing(self, job: DraftJob, known: DraftSequence) -> list[DraftLane]:
        """The lanes of a sequence that draw a token in this call, with room for their newest one."""
        request_id = job.request.request_id
        state = self._rounds.get(request_id)
        if state is None or not job.num_lanes or not depends_on_newest_only(known):
            return []
        begun = {lane.position for lane in state.lanes}
        for position in range(job.num_committed, job.num_committed + job.num_lanes):
            if position in state.seconds and position not in begun:
                self._open(state, request_id, position, known)
        for lane in [lane for lane in state.lanes if not self._has_room(lane)]:
            self._close(state, lane)
        return [lane for lane in state.lanes if not has_ended(job.request, lane.sequence.token_ids)]

    def _open(self, state: _Round, request_id: str, position: int, known: DraftSequence) -> None:
        token_ids = [*known.token_ids[:position], state.seconds[position]]
        lane_id = f"{request_id}\0{position}"  # no request is called so
        lane = DraftLane(lane_id, position, replace(known, token_ids=token_ids))
        if self._kv.fork(request_id, lane.lane_id, position):
            state.lanes.append(lane)

    def _has_room(self, lane: DraftLane) -> bool:
        return lane.length <= self._max_model_len and self._kv.make_own(lane.lane_id, lane.length)

    def failed(self, lane: DraftLane) -> None:
        """A lane's row failed: what it wrote may be non-finite."""
        self._kv.drop_suspect(lane.lane_id)
        self._rounds[lane.sequence.request.request_id].lanes.remove(lane)

    def answers(self, request_id: str) -> tuple[Lane, ...]:
        """The lanes of a request that have drafts."""
        state = self._rounds.get(request_id)
        lanes = [] if state is None else state.lanes
        return tuple(lane.answer for lane in lanes if lane.length > lane.position + 1)

    def drop(self, request_id: str) -> None:
        """End all lanes of a request, and forget its second choices."""
        state = self._rounds.pop(request_id, None)
        if state is not None:
            self._end(state)

    def drop_suspect(self, request_ids: Sequence[str]) -> None:
        """As `drop`, where a pass failed: it is unknown what was written."""
        for request_id in request_ids:
            state = self._rounds.pop(request_id, None)
            for lane in [] if state is None else state.lanes:
                self._kv.drop_suspect(lane.lane_id)

    def _end(self, state: _Round) -> None:
        for lane in list(state.lanes):
            self._close(state, lane)

    def _close(self, state: _Round, lane: DraftLane) -> None:
        self._kv.drop(lane.lane_id)
        state.lanes.remove(lane)
