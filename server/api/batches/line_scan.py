"""LineScan: reads a job's file once before anything runs, and finds all that is wrong with it."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from server.api.batches.records import Line
from server.http.errors import ApiError, shown
from server.http.json_body import parse_json

MAX_LINES = 50_000
MAX_ERRORS = 100  # that are told; beyond, the rest is not read
MAX_ID = 512
_LINES_A_TURN = 256
_BYTES_A_TURN = 1 << 20
_LOST = (errno.ENOENT, errno.EIO)  # of a file that later tries would not find either


class InputLost(Exception):
    """A job's file has gone from the disk, or holds something else where a line was."""


class _Wrong(Exception):
    """A line cannot be a request: a word for programs, a sentence for people, and the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "param": param}


class LineScan:
    """Reads `path` some lines at a time, none longer than `max_line_bytes`. For the store's thread."""

    def __init__(self, path: Path, endpoint: str, max_line_bytes: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._offset = 0
        self._number = 0
        self._num_found = 0
        self._seen: set[str] = set()
        self.errors: list[dict[str, object]] = []
        self.is_over = False

    def read(self) -> list[Line]:
        """The next valid lines; sets `is_over` behind the last. Raises OSError."""
        found: list[Line] = []
        try:
            self._read(found)
        except InputLost:
            self._fail("input_lost", "The file can no longer be read.")
        return found

    def errors_json(self) -> str:
        """What is wrong, as a batch tells it."""
        return json.dumps(self.errors)

    def _read(self, found: list[Line]) -> None:
        with _opened(self._path) as file:
            file.seek(self._offset)
            end = self._offset + _BYTES_A_TURN
            for _ in range(_LINES_A_TURN):
                content = file.readline(self._max_line_bytes + 1)
                if not content:
                    self._end()
                    break
                self._take(content, found)
                self._offset += len(content)
                if self.is_over or self._offset >= end:
                    break

    def _take(self, content: bytes, found: list[Line]) -> None:
        self._number += 1
        if not content.strip():
            return
        try:
            line = self._line(content)
        except _Wrong as wrong:
            self.errors.append({**wrong.error, "line": self._number})
            self.is_over = len(self.errors) >= MAX_ERRORS or wrong.error["code"] in _ENDS
            return
        found.append(line)

    def _line(self, content: bytes) -> Line:
        """Raises _Wrong."""
        if len(content) > self._max_line_bytes:
            message = f"The line takes more than {self._max_line_bytes} bytes, the limit of --max-body-bytes."
            raise _Wrong("line_too_long", message)
        self._num_found += 1
        if self._num_found > MAX_LINES:
            raise _Wrong("too_many_lines", f"The file has more than {MAX_LINES} requests, the limit.")
        custom_id = self._check(_parsed(content))
        if custom_id in self._seen:
            message = f"The custom_id '{shown(custom_id)}' is that of an earlier line."
            raise _Wrong("duplicate_custom_id", message, "custom_id")
        self._seen.add(custom_id)
        return Line(self._number, custom_id, self._offset, len(content))

    def _check(self, data: Mapping[str, Any]) -> str:
        """The custom_id of a line that is a request. Raises _Wrong."""
        custom_id, body = data.get("custom_id"), data.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
            message = f"'custom_id' must be a string of 1 to {MAX_ID} characters."
            raise _Wrong("invalid_custom_id", message, "custom_id")
        if data.get("method") != "POST":
            raise _Wrong("invalid_method", "'method' must be 'POST'.", "method")
        if data.get("url") != self._endpoint:
            raise _Wrong("invalid_url", f"'url' must be '{self._endpoint}', the batch's endpoint.", "url")
        if not isinstance(body, dict):
            raise _Wrong("invalid_body", "'body' must be an object.", "body")
        if body.get("stream"):
            raise _Wrong("invalid_body", "'stream' must be left out: a line has one answer.", "body.stream")
        return custom_id

    def _end(self) -> None:
        self.is_over = True
        if not self._num_found and not self.errors:
            self._fail("empty_file", "The file holds no requests.")

    def _fail(self, code: str, message: str) -> None:
        """Of the whole file."""
        self.is_over = True
        self.errors.append({"code": code, "message": message, "param": None, "line": None})


_ENDS = ("line_too_long", "too_many_lines")


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return parse_json(content)
    except ApiError as error:
        message = error.reply.message.replace("The body", "The line")
        raise _Wrong("invalid_json_line", message) from None


def read_body(path: Path, line: Line) -> bytes:
    """The body of a line that was found valid, as JSON, no longer than it was: its size has a limit, too.

    Raises InputLost, or OSError where it may be read later.
    """
    with _opened(path) as file:
        file.seek(line.offset)
        content = file.read(line.length)
    try:
        data = parse_json(content)
    except ApiError:
        raise InputLost from None
    if data.get("custom_id") != line.custom_id or not isinstance(data.get("body"), dict):
        raise InputLost
    return json.dumps(data["body"], ensure_ascii=False, separators=(",", ":")).encode()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        if error.errno in _LOST:
            raise InputLost from error
        raise
