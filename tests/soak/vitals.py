"""What the server's process holds: looked at from outside every second, and at rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.wire import ask

EVERY_S = 1.0
REST_S = 10.0  # within which it must come to rest
_REST_LOOK_S = 0.1
Labels = frozenset[tuple[str, str]]


class Samples:
    """One page of metrics."""

    def __init__(self, page: str) -> None:
        self._values: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                values = self._values.setdefault(sample.name.removeprefix("slipstream_"), [])
                values.append((frozenset(sample.labels.items()), sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name that have these labels."""
        wanted = frozenset(labels.items())
        return sum(value for found, value in self._values[name] if wanted <= found)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sums of those samples for each value of `label`, without the zeros."""
        values = {dict(found)[label] for found, _ in self._values[name]}
        sums = {value: self.total(name, **labels, **{label: value}) for value in sorted(values)}
        return {value: total for value, total in sums.items() if total}


@dataclass(frozen=True, slots=True)
class Vitals:
    """At `at` on the monotonic clock. Memory is resident, in MB of the process and its children."""

    at: float
    rss_mb: float
    num_fds: int
    num_threads: int
    blocks_used: int
    num_running: int
    num_waiting: int
    num_children: int

    @property
    def is_at_rest(self) -> bool:
        """Nothing runs, waits or holds a block."""
        return not (self.blocks_used or self.num_running or self.num_waiting)


@dataclass(slots=True)
class Observer:
    """Looks at one server; `seen` grows by a look a second while `watch` runs."""

    url: str
    process: psutil.Process
    seen: list[Vitals] = field(default_factory=list)

    async def look(self) -> Vitals:
        """Now."""
        page = await self.samples()
        children = self.process.children(recursive=True)
        return Vitals(
            at=time.monotonic(),
            rss_mb=sum(_rss_bytes([self.process, *children])) / 1e6,
            num_fds=self.process.num_fds(),
            num_threads=self.process.num_threads(),
            blocks_used=int(page.total("kv_cache_blocks", state="used")),
            num_running=int(page.total("num_requests_running")),
            num_waiting=int(page.total("num_requests_waiting")),
            num_children=len(children),
        )

    async def samples(self) -> Samples:
        """The page of metrics as it is now."""
        reply = await ask(self.url, "GET", "/metrics")
        assert reply.status == 200, reply.body[:200]
        return Samples(reply.body.decode())

    async def watch(self) -> None:
        """Every second, until it is cancelled."""
        while True:
            self.seen.append(await self.look())
            await asyncio.sleep(EVERY_S)

    async def rest(self) -> Vitals:
        """The first look that finds it at rest, or the last one when it does not come to rest in time."""
        until = time.monotonic() + REST_S
        await asyncio.sleep(_REST_LOOK_S)
        while not (vitals := await self.look()).is_at_rest and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_REST_LOOK_S)  # nothing tells from outside
        return vitals


def _rss_bytes(processes: Iterable[psutil.Process]) -> Iterable[int]:
    for process in processes:
        try:
            yield process.memory_info().rss
        except psutil.NoSuchProcess:  # a child that has just ended
            continue
