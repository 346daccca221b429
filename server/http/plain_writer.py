"""PlainWriter: what uvicorn writes of a reply, as a client that speaks HTTP/1.0 can read it."""

from __future__ import annotations

from collections.abc import Callable

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"  # the end of a head that announces no length
_BREAK = b"\r\n"


class PlainWriter:
    """Takes the chunks from a reply, which that version does not know: it ends where the connection does."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._is_begun = False
        self._is_chunked = False

    def __call__(self, data: bytes) -> None:
        """The whole head, then what is sent at once of the body."""
        if not self._is_begun:
            self._is_begun, self._is_chunked = True, data.endswith(_CHUNKED)
            data = data.removesuffix(_CHUNKED) + _BREAK if self._is_chunked else data
        elif self._is_chunked:
            size, _, rest = data.partition(_BREAK)
            data = rest[: int(size, 16)]
        self._write(data)
