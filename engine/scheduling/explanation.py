"""Say in one plain sentence what a request waits for."""

from __future__ import annotations

from engine.outputs import RequestExplanation
from engine.request import Request, RequestStatus
from engine.scheduling.seats import Seats


def explain(
    request: Request, seats: Seats, max_num_seqs: int, num_ahead: int, policy_name: str
) -> RequestExplanation:
    """How a request stands that has not ended; `num_ahead` counts who waits and goes before it."""
    runs = request.status is RequestStatus.RUNNING
    kv = seats.kv
    return RequestExplanation(
        request_id=request.request_id,
        status=request.status.value,
        waits_because=None if runs else _reason(request, seats, max_num_seqs, num_ahead, policy_name),
        position=None if runs else num_ahead + 1,
        preemptions=tuple(request.preemptions),
        num_known_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(kv.block_ids(request.request_id)) if request.request_id in kv else 0,
    )


def _reason(request: Request, seats: Seats, max_num_seqs: int, num_ahead: int, policy_name: str) -> str:
    start = "It waits" if request.status is RequestStatus.WAITING else "It was preempted and waits to resume"
    if num_ahead:
        others = "1 request" if num_ahead == 1 else f"{num_ahead} requests"
        return f"{start} behind {others} by policy {policy_name}."
    if len(seats) >= max_num_seqs:
        return f"{start} for a seat: {len(seats)} of {max_num_seqs} requests run."
    if not seats.can_take(request):
        needed = seats.kv.blocks_for(request.num_tokens)
        return (
            f"{start} for KV blocks: it needs {needed} and one must be left for each of {len(seats)} running "
            f"requests; {seats.kv.num_free_blocks} are free."
        )
    return f"{start} for the next step."
