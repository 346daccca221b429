"""Say how one live request is drafted for, and in one plain sentence why it is not."""

from __future__ import annotations

from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedSequence
from engine.plan.speculation.drafting_state import RequestDrafting


def request_drafting(
    request: Request, sequence: DraftedSequence | None, methods: tuple[str, ...], *, is_active: bool
) -> RequestDrafting:
    """What is drafted for a request of `methods`; `sequence` is None before it runs, or if it wants none."""
    tape_method = "" if sequence is None else sequence.tape.method
    num_tokens = 0
    if sequence is not None and is_active:
        num_tokens = max((view.limit for view in sequence.views.values()), default=0)
    why_off = _why_off(request, sequence, num_tokens, is_active=is_active)
    return RequestDrafting(methods, tape_method or None, 0 if why_off else num_tokens, why_off)


def _why_off(
    request: Request, sequence: DraftedSequence | None, num_tokens: int, *, is_active: bool
) -> str | None:
    if not request.speculation.enabled:
        return "The request asks for no drafts."
    if sequence is not None and sequence.is_given_up:
        return "What the model computed behind its last token was not finite: it goes on without drafts."
    if sequence is None or not is_active:
        return "It does not run."
    if not sequence.views:
        return f"No drafter here makes drafts of the method {request.speculation.method}."
    if request.grammar is not None and request.grammar.is_dear:
        return "To follow its grammar through drafts takes longer than they save."
    if num_tokens:
        return None
    if all(view.acceptance.pacing.is_off for view in sequence.views.values()):
        return "Too few of its drafts were right; one is tried now and then."
    return "Drafts would cost it more time than they save, as measured; one is tried now and then."
