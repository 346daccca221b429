"""Say in one plain sentence why a live request is not drafted for."""

from __future__ import annotations

from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedSequence


def why_not_drafted(request: Request, sequence: DraftedSequence | None, *, is_active: bool) -> str | None:
    """The reason that lies with the request, None without one.

    `sequence` is None before it runs, or if it wants no drafts.
    """
    if not request.speculation.enabled:
        return "The request asks for no drafts."
    if sequence is not None and sequence.is_given_up:
        return "What the model computed behind its last token was not finite: it goes on without drafts."
    if sequence is None or not is_active:
        return "It does not run."
    views = sequence.views.values()
    if not views:
        return f"No drafter here makes drafts of the method {request.speculation.method}."
    if request.grammar is not None and request.grammar.is_dear:
        return "To follow its grammar through drafts takes longer than they save."
    if any(view.limit for view in views):
        return None
    if all(view.acceptance.pacing.is_off for view in views):
        return "Too few of its drafts were right; one is tried now and then."
    return "Drafts would cost it more time than they save, as measured; one is tried now and then."
