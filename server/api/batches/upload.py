"""Upload: a multipart body, written to disk piece by piece as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from server.http.client import ClientGone
from server.http.errors import INVALID, ApiError, ErrorReply, invalid

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16  # the file included, however they are named
MAX_NAME = 255
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
_WRITE_BYTES = 1 << 20  # gathered before a thread writes them
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f]")


class Upload:
    """One body being read: the field `file` goes to `path`, the others into `fields`.

    Memory holds a mebibyte of it at most. For the event loop but for `_write`; `close` it in any case.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self.num_lines = 0
        self._file: BinaryIO | None = None
        self._pending = bytearray()
        self._last = b"\n"
        self._num_fields = 0
        self._headers: dict[str, bytes] = {}
        self._header_name, self._header_value = bytearray(), bytearray()
        self._name = ""
        self._value = bytearray()
        self._is_over = False

    async def read(self, content_type: str, receive: Receive) -> None:
        """Take the whole body. Raises ApiError, ClientGone, or OSError when the disk does not take it."""
        parser = self._parser(content_type)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            try:
                parser.write(message.get("body", b""))
            except MultipartParseError:
                raise invalid("The body is not valid multipart/form-data.") from None
            if len(self._pending) >= _WRITE_BYTES:
                await self._flush()
            more = message.get("more_body", False)
        if not self._is_over:
            raise invalid("The body ends before its last boundary.")
        if self.filename is None:
            raise invalid("The field 'file' is missing.", "file")
        await self._flush()
        self.num_lines += self._last != b"\n"

    def close(self) -> None:
        """Close the file, and delete it unless it was moved away."""
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _parser(self, content_type: str) -> MultipartParser:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "The body must be a form with a file: send it with 'content-type: multipart/form-data'."
            raise ApiError(ErrorReply(415, INVALID, message, code="unsupported_media_type"))
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._on_part_begin,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_end": self._on_end,
        }
        try:
            return MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError:
            raise invalid(f"The form's boundary has {len(boundary)} characters, too many for any.") from None

    async def _flush(self) -> None:
        content, self._pending = self._pending, bytearray()
        if content:
            self._last = bytes(content[-1:])
        await asyncio.get_running_loop().run_in_executor(None, self._write, content)

    def _write(self, content: bytearray) -> None:
        if self._file is None:
            self._file = self.path.open("xb")
            self.path.chmod(0o600)
        self.num_lines += content.count(b"\n")
        self._file.write(content)
        self._file.flush()

    # What the parser finds.

    def _on_part_begin(self) -> None:
        self._headers, self._name, self._value = {}, "", bytearray()
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise invalid(f"The form has more than {MAX_FIELDS} fields, the limit.")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > _MAX_HEADER_BYTES:
            raise invalid(f"A part's header takes more than {_MAX_HEADER_BYTES} bytes, the limit.")

    def _on_header_end(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()
        if len(self._headers) > _MAX_HEADERS:
            raise invalid(f"A part has more than {_MAX_HEADERS} headers, the limit.")

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise invalid("The field 'file' is there twice.", "file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = _UNNAMEABLE.sub("", name)[:MAX_NAME] or "upload"

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.num_bytes += end - start
            if self.num_bytes > self.max_bytes:
                message = f"The file is larger than {self.max_bytes} bytes, the limit of --max-file-size."
                raise ApiError(ErrorReply(413, INVALID, message, "file", "file_too_large"))
            self._pending += memoryview(data)[start:end]
        else:
            self._value += memoryview(data)[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise invalid(f"A field of the form takes more than {MAX_FIELD_BYTES} bytes, the limit.")

    def _on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_over = True
