"""What a run shows while it lasts: a live line on a terminal, a line now and then elsewhere. On stderr."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from server.commands.bench.live_counts import LiveCounts
from server.commands.bench.plan import Load

_REFRESH_S, _LINE_EVERY_S = 0.5, 10.0
_WINDOW = 6  # refreshes that the shown speed is averaged over


class LiveDisplay:
    """Shows `counts` while it is entered.

    It draws in the event loop, seldom: a thread of its own would hold up the clocks just as long, more often.
    """

    def __init__(self, counts: LiveCounts, load: Load, console: Console) -> None:
        self._counts = counts
        self._load = load
        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.description}", style="none"),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("starting", total=load.num_requests or load.duration_s)
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._began = time.monotonic()

    async def __aenter__(self) -> LiveDisplay:
        self._progress.start()
        self._task = asyncio.create_task(self._keep_showing())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._progress.stop()

    async def _keep_showing(self) -> None:
        every_s = _REFRESH_S if self._console.is_terminal else _LINE_EVERY_S
        while True:
            self._seen.append((time.monotonic(), self._counts.num_events))
            if self._console.is_terminal:
                self._draw()
            await asyncio.sleep(every_s)
            if not self._console.is_terminal:
                self._seen.append((time.monotonic(), self._counts.num_events))
                self._console.print(f"{self._elapsed_s():.0f} s: {self.line()}", soft_wrap=True)

    def _draw(self) -> None:
        ended = self._counts.num_done + self._counts.num_failed
        completed = ended if self._load.num_requests is not None else self._elapsed_s()
        self._progress.update(self._bar, completed=completed, description=self.line())
        self._progress.refresh()

    def line(self) -> str:
        """How it stands, in a few words."""
        counts, total = self._counts, self._load.num_requests
        ended = counts.num_done + counts.num_failed
        done = f"{ended} of {total} done" if total is not None else f"{ended} done"
        failed = f", {counts.num_failed} failed" if counts.num_failed else ""
        return f"{done}, {counts.num_in_flight} running, {self._tokens_per_s():.0f} tok/s{failed}"

    def _tokens_per_s(self) -> float:
        """Events a second lately: about one token each."""
        (before, few), (now, many) = self._seen[0], self._seen[-1]
        return (many - few) / (now - before) if now > before else 0.0

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began
