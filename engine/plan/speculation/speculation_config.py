"""SpeculationConfig: the limits and rules of drafting for the whole server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["async", "sync", "auto"]
Verification = Literal["match", "rejection", "block"]
LengthPolicyName = Literal["fixed", "threshold", "goodput"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The settings have checked it. `max_draft_tokens` limits what a step verifies of one request.

    A `min_acceptance_rate` of 0 never turns drafting off.
    """

    vocab_size: int
    max_draft_tokens: int
    schedule: Schedule = "auto"
    verification: Verification = "match"
    length_policy: LengthPolicyName = "goodput"
    min_acceptance_rate: float = 0.3
