"""What a burst of streams looked like from outside, and the figures that come of it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class BenchmarkFailed(Exception):
    """A benchmark could not be measured; the message says why. The others still run."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile by linear interpolation between the sorted values; raises on no values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One request of a burst. Times are seconds of one clock; `event_times` has one entry an output event.

    `num_output_tokens` is the server's own count: an event may carry more than one token.
    """

    sent: float
    event_times: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StreamRecord:
        """The record that a worker process wrote with `dataclasses.asdict`."""
        return cls(**{**record, "event_times": tuple(record["event_times"])})


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """One burst. Output tokens a second count from the first request sent to the last event of all.

    `decode_tokens_per_s` is the middle stream's own rate from its first to its last event; 0 of one event.
    """

    output_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_event: float
    cached_tokens: int

    @classmethod
    def of(cls, records: Sequence[StreamRecord]) -> BurstFigures:
        """Raises ValueError when a stream gave nothing."""
        if not records or not all(record.event_times for record in records):
            raise ValueError("a stream ended without any output")
        started = min(record.sent for record in records)
        ended = max(record.event_times[-1] for record in records)
        tokens = sum(record.num_output_tokens for record in records)
        ttft = [record.event_times[0] - record.sent for record in records]
        gaps = [gap for record in records for gap in gaps_of(record.event_times)]
        return cls(
            output_tokens_per_s=tokens / (ended - started),
            decode_tokens_per_s=percentile([decode_rate(record) for record in records], 50),
            ttft_p50_ms=1e3 * percentile(ttft, 50),
            ttft_p99_ms=1e3 * percentile(ttft, 99),
            itl_p50_ms=1e3 * percentile(gaps or [0.0], 50),
            itl_p99_ms=1e3 * percentile(gaps or [0.0], 99),
            tokens_per_event=tokens / sum(len(record.event_times) for record in records),
            cached_tokens=sum(record.num_cached_tokens for record in records),
        )


def decode_rate(record: StreamRecord) -> float:
    """Tokens a second after the first event, which is taken to have carried one; 0 without another."""
    seconds = record.event_times[-1] - record.event_times[0]
    return (record.num_output_tokens - 1) / seconds if seconds > 0 else 0.0


def gaps_of(times: Sequence[float]) -> list[float]:
    """The time from each event to the next."""
    return [later - earlier for earlier, later in pairwise(times)]


def steady_step_s(streams: Sequence[Sequence[float]], settle: int) -> float:
    """Mean seconds a decode step took while every stream was decoding, from the arrival times of its tokens.

    Steps count from when the last stream has its `settle`-th token until the first stream ends; each step
    gives every stream one token, so the stream that ends first tells the steps apart. Raises ValueError when
    fewer than two of its tokens lie in that window.
    """
    steady_from = max(times[settle - 1] for times in streams)
    first_to_end = min(streams, key=lambda times: times[-1])
    inside = [time for time in first_to_end if time >= steady_from]
    if len(inside) < 2:
        raise ValueError("the streams were never decoding all at once")
    return (inside[-1] - inside[0]) / (len(inside) - 1)
