"""FigureHistory: what the status page draws, of the last ten minutes.

Figures are taken every other second whether anyone looks or not, so that a page has a past when it is opened.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from engine import BatchMetrics, Engine, EngineGauges, FinishReason
from server.http.json_reply import encode_json
from server.observability.http_metrics import HttpMetrics

PERIOD_S = 2.0
NUM_KEPT = 300  # ten minutes; about 200 KB in all, whatever is served


class FigureHistory:
    """Figures of the last ten minutes, as the JSON they are sent as. Event-loop thread only.

    `start` takes figures every PERIOD_S seconds until `stop`. `clock` is in seconds, from any origin.
    """

    def __init__(
        self, engine: Engine, http: HttpMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._http = http
        self._clock = clock
        self._started = clock()
        self._kept: deque[tuple[float, str]] = deque(maxlen=NUM_KEPT)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Keep figures from now on."""
        self.keep()
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.start)

    def stop(self) -> None:
        """Keep no more. Safe before `start`."""
        if self._timer is not None:
            self._timer.cancel()

    def keep(self) -> None:
        """Keep the figures of this instant, and forget the oldest where there are too many."""
        self._kept.append(self._sample())

    def since(self, after_s: float) -> list[str]:
        """JSON objects: what was kept later than `after_s` seconds since the start, then the present."""
        return [*(text for at, text in self._kept if at > after_s), self._sample()[1]]

    def _sample(self) -> tuple[float, str]:
        at = round(self._clock() - self._started, 3)
        figures = read_figures(self._engine.metrics, self._engine.gauges(), self._http)
        return at, encode_json({"at": at, **figures})


def read_figures(metrics: BatchMetrics, gauges: EngineGauges, http: HttpMetrics) -> dict[str, object]:
    """Counters since the start and gauges of this instant; histograms as the counts up to each bound."""
    stats = metrics.speculation
    return {
        "generated": metrics.generation_tokens,
        "running": gauges.num_requests_running,
        "waiting": gauges.num_requests_waiting,
        "swapped": gauges.num_requests_swapped,
        "ttft": list(accumulate(metrics.time_to_first_token.counts)),
        "itl": list(accumulate(metrics.inter_token_latency.counts)),
        "drafted": sum(stats.proposed.values()),
        "accepted": sum(stats.accepted.values()),
        "rounds": stats.num_rounds,
        "speedup": round(gauges.speculation_speedup, 4),
        "kv": [gauges.kv_blocks_used, gauges.kv_blocks_cached, gauges.kv_blocks_free],
        "prefix": [metrics.prefix_cache_queries, metrics.prefix_cache_hits],
        "counts": _counts(metrics, http),
    }


def _counts(metrics: BatchMetrics, http: HttpMetrics) -> dict[str, int]:
    finished = metrics.requests_finished
    # A probe that is told "not ready" is no error of the server.
    server_errors = (
        count for (route, code), count in http.requests.items() if code >= 500 and route.startswith("/v1")
    )
    return {
        "completed": finished[FinishReason.STOP] + finished[FinishReason.LENGTH],
        "failed": finished[FinishReason.ERROR],
        "aborted": finished[FinishReason.ABORT],
        "late": metrics.deadlines_missed,
        "refused": sum(metrics.requests_rejected.values()),
        "http": sum(server_errors),
        "preempted": sum(metrics.preemptions.values()),
        "faults": sum(metrics.engine_errors.values()),
        "lines": sum(http.batch_lines.values()),
        "unanswered": sum(http.batch_load()),
    }
