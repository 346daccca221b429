"""EmbeddingMetrics: what the embedding service counts about itself, beside the requests that all count."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from engine.plan.metrics.batch_metrics import LATENCY_BOUNDS_S, TOKEN_COUNT_BOUNDS
from engine.plan.metrics.histogram import Histogram


@dataclass(slots=True)
class EmbeddingMetrics:
    """Running totals since the start, never reset. Seconds and tokens."""

    texts: int = 0  # texts and pairs computed
    tokens: int = 0  # of these
    request_latency: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS_S))  # from arrival
    batch_duration: Histogram = field(default_factory=partial(Histogram, LATENCY_BOUNDS_S))
    batch_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BOUNDS))
