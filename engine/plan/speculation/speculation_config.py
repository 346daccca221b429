"""SpeculationConfig: the limits and rules of drafting that hold for the whole server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["async", "sync", "auto"]
Verification = Literal["match", "rejection", "block"]
LengthPolicyName = Literal["fixed", "threshold", "goodput"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Checked against the settings already.

    `max_draft_tokens` is the most that a step verifies of one request. `min_acceptance_rate` 0 never
    disables.
    """

    vocab_size: int
    max_draft_tokens: int
    schedule: Schedule = "auto"
    verification: Verification = "match"
    length_policy: LengthPolicyName = "goodput"
    min_acceptance_rate: float = 0.3
