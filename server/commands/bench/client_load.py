"""Whether the client itself was the bottleneck: how late its event loop ran, how much of a core it took."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

from server.commands.bench.distribution import Distribution

_EVERY_S = 0.05
# Beyond these, latencies are the client's own to a degree that shows.
_BUSY_SHARE, _LATE_MS = 0.85, 20.0


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """`cpu_share` is of one core; `loop_lag_ms` is how late the event loop came to what was due."""

    cpu_share: float
    loop_lag_ms: Distribution

    @property
    def is_bottleneck(self) -> bool:
        """True when the figures say as much of this client as of the server."""
        return self.cpu_share > _BUSY_SHARE or self.loop_lag_ms.p99 > _LATE_MS


class ClientWatch:
    """Watches this process while it is entered; `load` is there afterwards."""

    def __init__(self) -> None:
        self.load = ClientLoad(0.0, Distribution.of([]))
        self._lags_s: list[float] = []

    async def __aenter__(self) -> ClientWatch:
        self._began = (time.perf_counter(), time.process_time())
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        wall, cpu = self._began
        share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - wall)
        self.load = ClientLoad(share, Distribution.of([1000 * lag for lag in self._lags_s]))

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._lags_s.append(max(0.0, time.perf_counter() - due))
