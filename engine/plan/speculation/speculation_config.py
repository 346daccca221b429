"""SpeculationConfig: the limits and rules of drafting for the whole server."""

from __future__ import annotations

from dataclasses import dataclass
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
