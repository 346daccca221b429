"""Server-sent events out of a byte stream."""

from __future__ import annotations


class EventSplitter:
    """Cuts bytes into the payloads of their `data:` events; comments and other fields are dropped.

    Lines may end in LF or CRLF. Cheap enough for a hundred thousand events a second.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event)) is not None]


def _payload(event: bytes) -> bytes | None:
    """What follows `data:`; several such lines are joined. None when there is none."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
