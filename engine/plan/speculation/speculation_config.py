"""SpeculationConfig: how the whole server drafts. DraftingRules, DraftingChange: what of it may change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Schedule = Literal["async", "sync", "auto"]
Verification = Literal["match", "rejection", "block"]
LengthPolicyName = Literal["fixed", "threshold", "goodput"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The rules of drafting for the whole server; the settings have checked them."""

    vocab_size: int
    max_draft_tokens: int  # that a step verifies of one request
    schedule: Schedule = "auto"
    verification: Verification = "match"
    length_policy: LengthPolicyName = "goodput"
    min_acceptance_rate: float = 0.3  # 0 never turns drafting off
    draft_shrink_rate: float = 0.5  # of `threshold`; 0 never shortens drafts


@dataclass(frozen=True, slots=True)
class DraftingChange:
    """New values for a request or for the server; None leaves the old one.

    `method` is one that the server has, or "auto" for any; the server as a whole has no method to change.
    """

    enabled: bool | None = None
    num_tokens: int | None = None
    length_policy: LengthPolicyName | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True)
class DraftingRules:
    """What holds for all requests, within what was loaded. A request may want less, or another policy."""

    num_tokens: int  # the longest draft that a step verifies of one request
    length_policy: LengthPolicyName
    enabled: bool = True

    def changed(self, change: DraftingChange) -> DraftingRules:
        """These rules with the new values."""
        return replace(
            self,
            num_tokens=self.num_tokens if change.num_tokens is None else change.num_tokens,
            length_policy=change.length_policy or self.length_policy,
            enabled=self.enabled if change.enabled is None else change.enabled,
        )
