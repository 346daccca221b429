"""Whether drafts are made, by whom and when, and one plain sentence where they are not."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
