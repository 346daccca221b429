"""DraftingRules: what of drafting may change while the server runs; DraftingChange: what is to change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.plan.speculation.speculation_config import LengthPolicyName


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
