"""LongList: a part of a reply that is made only as it is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


class LongList:
    """A JSON list of small items that are made as they are read, each time anew and in any thread."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterable[object]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return iter(self._make())

    def __eq__(self, other: object) -> bool:
        """Equal to a list of the same items."""
        return isinstance(other, LongList | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
