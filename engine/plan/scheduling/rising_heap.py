"""RisingHeap: finds the least of many names whose keys rise, without asking for all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[float, ...])


class RisingHeap(Generic[Key]):
    """Names in the order of `key(name)`, which may rise at any time, and fall only where `put` says so.

    A place in the heap remembers a key that was right once, so it is never too high: what comes out first is
    put back where it belongs by now, until the first is right. Every operation is O(log n), amortised over
    the times that keys rise; ties are broken by who was put first.
    """

    def __init__(self, key: Callable[[str], Key]) -> None:
        self._key: Callable[[str], Key] = key
        self._heap: list[tuple[Key, int, str]] = []
        self._serials = count()
        self._serial_of: dict[str, int] = {}  # of each name's live place

    def put(self, name: str) -> None:
        """Take this name in; to be said again whenever its key may have fallen."""
        serial = self._serial_of[name] = next(self._serials)
        heapq.heappush(self._heap, (self._key(name), serial, name))
        self._compact()

    def drop(self, name: str) -> None:
        """Leave this name out. KeyError when it is not in."""
        del self._serial_of[name]
        self._compact()

    def least(self) -> str | None:
        """The name with the least key now; None if there is none."""
        heap = self._heap
        while heap:
            known, serial, name = heap[0]
            if self._serial_of.get(name) != serial:
                heapq.heappop(heap)
                continue
            key = self._key(name)
            if key == known:
                return name
            heapq.heapreplace(heap, (key, serial, name))
        return None

    def _compact(self) -> None:
        """Forget the dead places when they are more than the live ones."""
        if len(self._heap) > 2 * len(self._serial_of) + 8:
            self._heap = [place for place in self._heap if self._serial_of.get(place[2]) == place[1]]
            heapq.heapify(self._heap)
