"""Whether a deadline can be met at all, by what steps were measured to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from engine.plan.request import Request
from engine.plan.scheduling.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class Load:
    """What a newcomer meets: who runs, who waits and goes first, and the limits of a step.

    `num_to_compute` counts the newcomer's tokens that nobody has computed yet, or is computing.
    """

    num_to_compute: int
    running: Sequence[Request]
    ahead: Sequence[Request]
    max_num_seqs: int
    max_prefill_tokens: int


def earliest_finish_s(request: Request, load: Load, costs: CostModel) -> float | None:
    """Seconds until the request ends if everything goes well from now on; None while costs are unknown.

    It cannot be sooner than that: a seat becomes free, then the request has the server to itself. Whoever
    may stop early is taken to stop at once, and the prompts of others to cost nothing.
    """
    own = costs.time_to_finish_s(request, load.num_to_compute, load.max_prefill_tokens)
    one, all_seats = costs.step_s(0, 1), costs.step_s(0, load.max_num_seqs)
    if own is None or one is None or all_seats is None:
        return None
    before = [*load.running, *load.ahead]
    num_to_end = len(before) + 1 - load.max_num_seqs  # before this one gets a seat
    if num_to_end <= 0:
        return own
    shortest = nsmallest(num_to_end, (_least_steps_left(other) for other in before))
    seat = max(shortest[-1] * one, sum(shortest) / load.max_num_seqs * all_seats)
    return seat + own


def _least_steps_left(request: Request) -> int:
    return max(1, request.least_output_tokens - request.num_output_tokens)
