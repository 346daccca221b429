"""Whether drafts are made, by whom and when, and one plain sentence where they are not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedSequence
from engine.plan.speculation.speculation_config import DraftingRules


@dataclass(frozen=True, slots=True)
class DrafterState:
    """One drafter. Its `schedule` is "inline" (on the loop's own thread), "sync", "async", "off", or "auto"
    until these have been measured.
    """

    method: str
    max_tokens: int  # of one draft
    schedule: str
    why_off: str | None  # None while it drafts


@dataclass(frozen=True, slots=True)
class DraftingState:
    """The server's drafting at this instant. `schedule` is the one that is set; auto chooses by measuring."""

    rules: DraftingRules
    schedule: str
    drafters: tuple[DrafterState, ...]
    why_off: str | None  # why none of them drafts; None while one does

    def of(self, methods: tuple[str, ...]) -> tuple[DrafterState, ...]:
        """The drafters of these methods."""
        return tuple(drafter for drafter in self.drafters if drafter.method in methods)


@dataclass(frozen=True, slots=True)
class RequestDrafting:
    """That of one live request."""

    methods: tuple[str, ...]  # that may draft for it
    drafter: str | None  # who made its newest drafts
    num_tokens: int  # the longest draft that it may have
    length: int  # drafts that are worth having next
    length_policy: str
    why_off: str | None  # None while drafts are wanted
    schedule: str = ""  # of its drafter, or of the first that may draft for it; empty without any

    def within(self, state: DraftingState) -> RequestDrafting:
        """The same, now that the server's state is known: off if all of its drafters are."""
        drafters = state.of(self.methods)
        if not drafters:
            return self
        first = next((each for each in drafters if each.why_off is None), drafters[0])
        why_off = self.why_off or first.why_off
        length = self.length if why_off is None else 0
        return replace(self, length=length, why_off=why_off, schedule=first.schedule)


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
