"""Say in one plain sentence what a request waits for."""

from __future__ import annotations

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.seats import Seats
from engine.plan.step_records import RequestExplanation


def explain(
    request: Request, queue: RequestQueue, seats: Seats, max_num_seqs: int, policy_name: str
) -> RequestExplanation:
    """How a request stands that has not ended. O(waiting)."""
    position, reason = None, None
    if request.status is not RequestStatus.RUNNING:
        position = len(queue.ahead_of(request)) + 1
        start = (
            "It waits" if request.status is RequestStatus.WAITING else "It was preempted and waits to resume"
        )
        leader = queue.held_for(request.request_id)
        if leader is not None:
            reason = f"{start} until {leader} has computed the prompt tokens that both begin with."
        elif position > 1:
            others = "1 request" if position == 2 else f"{position - 1} requests"
            reason = f"{start} behind {others} by policy {policy_name}."
        else:
            reason = f"{start} {_what_is_missing(request, seats, max_num_seqs)}."
    kv = seats.kv
    return RequestExplanation(
        request_id=request.request_id,
        status=request.status.value,
        waits_because=reason,
        position=position,
        preemptions=tuple(request.preemptions),
        num_known_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(kv.block_ids(request.request_id)) if request.request_id in kv else 0,
    )


def _what_is_missing(request: Request, seats: Seats, max_num_seqs: int) -> str:
    """What the first in the queue waits for."""
    if len(seats) >= max_num_seqs:
        return f"for a seat: {len(seats)} of {max_num_seqs} requests run"
    if not seats.can_take(request):
        needed, running = seats.kv.blocks_for(request.num_tokens), len(seats)
        return (
            f"for KV blocks: it needs {needed} and one must be left for each of {running} running requests; "
            f"{seats.kv.num_free_blocks} are free"
        )
    return "for the next step"
