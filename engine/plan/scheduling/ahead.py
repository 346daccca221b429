"""plan_ahead: the step behind the one in flight, before anybody has read what that one draws."""

from __future__ import annotations

from engine.plan.scheduling.flights import Flight
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.step_inputs import Cargo, token_drawn_by
from engine.plan.speculation.controller import StepLoad
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder


def plan_ahead(
    flight: Flight, running: RunningSet, decoder: SpeculativeDecoder, limit: int
) -> list[Cargo] | None:
    """The next token of everybody who runs, by the row of `flight` that draws the one before it.

    None if the next step has to wait: unless all who run are drawn for in `flight`, and without drafts, or if
    more than a draw is wanted of anybody's logits, which may need the token before it and keeps the device
    waiting anyway, or if drafts are at hand or waited for, or blocks are short, or there are more than
    `limit`. Otherwise the controller has been told of the load, and blocks are there.

    Those whose last token `flight` draws are left out. Who ends by a stop token or string, or is ended, has a
    token drawn in vain: whoever commits drops it. That is async scheduling as vLLM does it and SGLang's
    overlap scheduling, but nothing is written into a request before its token is read.
    """
    if flight.decision.num_draft_tokens:
        return None
    rows = flight.rows()
    cargo: list[Cargo] = []
    for request in running:
        row = rows.get(request.request_id)
        if row is None:
            return None
        if len(request.token_ids) + 1 < request.max_num_tokens:
            cargo.append(token_drawn_by(request, row))
    going_on = [item.request for item in cargo]
    if not 0 < len(cargo) <= limit or not all(request.wants_only_draws for request in going_on):
        return None
    if decoder.expects_drafts(going_on) or not running.make_room_ahead(going_on):
        return None
    decoder.choose(going_on, StepLoad(len(cargo), len(cargo), num_prefill_tokens=0, max_draft_tokens=0))
    return cargo
