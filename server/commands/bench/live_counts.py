"""How a run stands, shown while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LiveCounts:
    """Plain counts, written by the requests. An event of a stream is about one token."""

    num_done: int = 0
    num_failed: int = 0
    num_in_flight: int = 0
    num_events: int = 0
