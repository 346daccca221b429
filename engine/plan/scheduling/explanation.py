"""RequestExplanation: how a live request stands, and in one plain sentence what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.kv.disk_tier import disk_hold
from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.speculation.drafting_state import RequestDrafting


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """How one live request stands between two steps, and why it waits."""

    request_id: str
    status: str
    waits_because: str | None  # one plain sentence; None while it runs
    position: int | None  # in the queue, from 1; None while it runs
    priority: int
    deadline_s: float | None  # from its arrival; None for no limit
    preemptions: tuple[tuple[float, str], ...]  # (engine clock, "recompute" or "swap")
    num_known_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_blocks: int  # on the device
    drafting: RequestDrafting


def explain(
    request: Request,
    queue: RequestQueue,
    running: RunningSet,
    policy_name: str,
    drafting: RequestDrafting,
) -> RequestExplanation:
    """How a request stands that has not ended, and is drafted for. O(waiting)."""
    position, reason = None, None
    if request.status is not RequestStatus.RUNNING:
        position = len(queue.ahead_of(request)) + 1
        is_new = request.status is RequestStatus.WAITING
        start = "It waits" if is_new else "It was preempted and waits to resume"
        leader = queue.held_for(request.request_id)
        if leader == disk_hold(request.request_id):
            reason = f"{start} until the prompt tokens that it begins with are read from disk."
        elif leader is not None:
            reason = f"{start} until {leader} has computed the prompt tokens that both begin with."
        elif position > 1:
            others = "1 request" if position == 2 else f"{position - 1} requests"
            reason = f"{start} behind {others} by policy {policy_name}."
        else:
            reason = f"{start} {_what_is_missing(request, running)}."
        if request.is_late:
            reason += " It will probably miss its deadline: those that can be in time go first."
    kv, stats = running.kv, request.spec_stats
    return RequestExplanation(
        request_id=request.request_id,
        status=request.status.value,
        waits_because=reason,
        position=position,
        priority=request.priority,
        deadline_s=None if request.deadline is None else request.deadline - request.arrival_time,
        preemptions=tuple(request.preemptions),
        num_known_tokens=request.num_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_draft_tokens=0 if stats is None else stats.proposed.total(),
        num_accepted_tokens=0 if stats is None else stats.accepted.total(),
        num_blocks=kv.num_blocks_held(request.request_id) if request.request_id in kv else 0,
        drafting=drafting,
    )


def _what_is_missing(request: Request, running: RunningSet) -> str:
    """What the first in the queue waits for."""
    kv = running.kv
    if len(running) >= running.max_num_seqs:
        return f"for a seat: {len(running)} of {running.max_num_seqs} requests run"
    if not running.can_admit(request):
        return (
            f"for KV blocks: it needs {kv.blocks_for(request.num_tokens)} and one must be left for each of "
            f"{len(running)} running requests; {kv.pool.num_free} are free"
        )
    return "for the next step"
