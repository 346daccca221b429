"""OpenTenants: whose requests are being answered, so that work in Python can give way to the others'."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

REST = 3  # seconds for each second of work, at most: large bodies are read at a quarter of the speed then


class OpenTenants:
    """Counts the open requests of each tenant. Event-loop thread only, but for `give_way`."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._is_one_alone = threading.Event()
        self._is_one_alone.set()

    @contextmanager
    def serving(self, tenant: str) -> Iterator[None]:
        """A request of this tenant is open."""
        self._open[tenant] += 1
        self._note()
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
                self._note()

    def _note(self) -> None:
        is_one_alone = len(self._open) <= 1
        if is_one_alone != self._is_one_alone.is_set():
            (self._is_one_alone.set if is_one_alone else self._is_one_alone.clear)()

    def give_way(self, worked_s: float) -> None:
        """Return when no second tenant has a request open, at the latest after `REST` times `worked_s`.

        For a thread that has kept the interpreter for so long: each switch to another thread takes
        milliseconds from a thread that never waits, and a short request needs dozens of them.
        """
        self._is_one_alone.wait(REST * worked_s)
