"""HttpMetrics: what the HTTP side counts, as plain numbers; `server.observability.metrics` exports them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger("slipstream.server")

MAX_NAMES = 100  # of unknown fields, in the log and so of a request
# A counter that appears with its first count has no rate then: the first error would go unseen.
_FORESEEN = tuple(
    (route, code)
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    for code in (200, 400, 500, 529 if route == "/v1/messages" else 503, 504)
)


def _foreseen_requests() -> Counter[tuple[str, int]]:
    return Counter(dict.fromkeys(_FORESEEN, 0))


def _no_lines() -> Counter[str]:
    return Counter(dict.fromkeys(("completed", "failed", "expired", "cancelled"), 0))


@dataclass(slots=True)
class HttpMetrics:
    """Running totals since the start; event-loop thread only.

    `requests` is keyed by (route template, status code), so that nothing a client writes becomes a label;
    those that matter most are there from the start.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=_foreseen_requests)
    ignored_parameters: int = 0
    batch_lines: Counter[str] = field(default_factory=_no_lines)  # by how they ended
    batch_load: Callable[[], tuple[int, int]] = lambda: (0, 0)  # lines that run, and that wait
    _logged: set[str] = field(default_factory=set)

    def count_ignored(self, count: int, names: Sequence[str]) -> None:
        """Count unknown request fields; each of `names` is logged once, the first hundred of them."""
        self.ignored_parameters += count
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_NAMES:
                self._logged.add(name)
                log.warning("a request field is unknown and ignored: %s", name)
