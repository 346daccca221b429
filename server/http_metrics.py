"""HttpMetrics: what the HTTP side counts, as plain numbers; `server.metrics` exports them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger("slipstream.server")

_MAX_NAMES_LOGGED = 100


@dataclass(slots=True)
class HttpMetrics:
    """Running totals since the start; event-loop thread only.

    `requests` is keyed by (route template, status code): nothing a client writes becomes a label.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    ignored_parameters: int = 0
    _logged: set[str] = field(default_factory=set)

    def count_ignored(self, names: Sequence[str]) -> None:
        """Count request fields nobody knows; each name is logged once, the first hundred of them."""
        self.ignored_parameters += len(names)
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_NAMES_LOGGED:
                self._logged.add(name)
                log.warning("a request field is unknown and ignored: %s", name)
