"""Activity: what the engine did up to a time, or between two, in plain numbers."""

from __future__ import annotations

from operator import sub
from typing import NamedTuple

from engine.plan.metrics.histogram import Histogram

PHASES = ("prefill", "decode", "mixed")


class Activity(NamedTuple):
    """What was counted up to a time of the engine's clock; a difference of two is what came in between."""

    seconds: float  # that time, or the length of the difference
    num_ended: int
    prompt_tokens: int
    generation_tokens: int
    num_sequences: int  # the sum of the batch sizes of all steps
    busy_s: float  # in steps
    seats_s: float  # in steps, times the share of seats in use
    kv_s: float  # in steps, times the share of K/V blocks in use
    step_tokens: Histogram
    time_to_first_token: Histogram
    prefill: Histogram  # seconds of the steps that computed nothing else
    decode: Histogram
    mixed: Histogram  # of those that computed both

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*map(sub, self, earlier))

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self.step_tokens.count

    def figures(self) -> dict[str, float]:
        """All of it in numbers for a log, by name; of what was observed many times the mean."""
        means = (value.mean if isinstance(value, Histogram) else value for value in self)
        return {name: round(mean, 4) for name, mean in zip(self._fields, means, strict=True)}
