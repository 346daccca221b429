"""choose_drafts: what a step has left for drafts, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.request import Request
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.step_inputs import Cargo
from engine.plan.scheduling.token_budget import TokenBudget
from engine.plan.speculation.controller import StepLoad
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import ScheduledRequest


def choose_drafts(
    decoder: SpeculativeDecoder, decodes: Sequence[Request], budget: TokenBudget, running: RunningSet
) -> list[Cargo]:
    """Spend what decodes and prefill leave of the budget on drafts: those of `decodes` that get any.

    Drafts take free blocks only: nobody is preempted for them, and each running request's next block is left.
    """
    if not decodes:
        return []
    load = StepLoad(
        num_seqs=len(decodes),
        num_tokens=budget.num_decode_tokens + budget.num_prefill_tokens,
        num_prefill_tokens=budget.num_prefill_tokens,
        max_draft_tokens=budget.drafts_left,
        draft_s=decoder.waited_s,
    )
    verified: list[Cargo] = []
    for request, drafted in decoder.choose(decodes, load):
        count = running.make_room_for_drafts(request, len(drafted))
        if count:
            budget.take_drafts(count)
            first = request.num_computed_tokens
            scheduled = ScheduledRequest(request.request_id, first, 1 + count, samples=True, num_drafts=count)
            verified.append(Cargo(scheduled, request, drafted[:count]))
    return verified
