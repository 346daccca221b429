"""Tally: what the clients of a soak saw, as plain numbers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES = 10
MAX_CHARS = 600  # of an example


@dataclass(slots=True)
class Tally:
    """Running totals of one client process. A surprise is whatever a right server does not do."""

    num_sent: int = 0  # requests for text, the canary's included
    statuses: Counter[int] = field(default_factory=Counter)  # of replies that were read to their end
    endings: Counter[str] = field(default_factory=Counter)  # finish reasons, refusals, clients that left
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # when, and after how many seconds
    num_canaries: int = 0
    num_surprises: int = 0
    examples: list[str] = field(default_factory=list)

    def surprise(self, what: str) -> None:
        """Count one; the first few are kept in words."""
        self.num_surprises += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(what[:MAX_CHARS])

    def note_first_token(self, seconds: float) -> None:
        """A stream's first event came after so long."""
        self.first_tokens.append((time.monotonic(), seconds))

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "sent": self.num_sent,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "endings": dict(sorted(self.endings.items())),
            "canaries": self.num_canaries,
            "surprises": self.num_surprises,
            "examples": self.examples,
        }
