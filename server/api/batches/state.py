"""BatchState: the store on a thread of its own, opened when it is first needed."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from server.api.batches.store import BatchStore, FolderTaken
from server.http.errors import OVERLOADED, SERVER, ApiError, ErrorReply

T = TypeVar("T")

log = logging.getLogger("slipstream.server")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class BatchState:
    """Runs calls on the store one after the other, in a thread. Event-loop thread only.

    Whatever stands in the way, a folder that cannot be used above all, is an ApiError that says so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: ThreadPoolExecutor | None = None
        self._store: BatchStore | None = None
        self._is_closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def was_used(self) -> bool:
        """True when an earlier server has left something in the folder."""
        try:
            return (self.folder / "batches.sqlite3").exists()
        except OSError:
            return False

    async def run(self, call: Callable[[BatchStore], T]) -> T:
        """What `call` makes of the store. Raises ApiError; cancelled, the call still happens."""
        if self._is_closed:
            message = "The server is shutting down."
            raise ApiError(
                ErrorReply(503, OVERLOADED, message, code="draining", headers={"retry-after": "1"})
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, call)

    async def close(self) -> None:
        """Finish what was begun and let the folder go.

        Safe to call twice: who is cancelled here no longer waits, and who calls again does.
        """
        self._is_closed = True
        if self._thread is None:
            return
        if self._closing is None:
            self._closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _run(self, call: Callable[[BatchStore], T]) -> T:
        try:
            if self._store is None:
                self._store = BatchStore(self.folder)
            return call(self._store)
        except (OSError, sqlite3.Error, FolderTaken) as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> ApiError:
        """What a client is told of a disk or a database that fails; the log says more."""
        return _reply(error, is_open=self._store is not None)


def _reply(error: Exception, *, is_open: bool) -> ApiError:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL or "full" in str(error):
        log.error("there is no room for files and batches: see --state-dir")
        message = "The server has no room to keep this."
        return ApiError(ErrorReply(507, SERVER, message, code="insufficient_storage"))
    log.error("files and batches cannot be kept: %s: %s", type(error).__name__, error)
    if is_open:
        return ApiError(ErrorReply(500, SERVER, "The server's files and batches could not be read."))
    reason = "another server of this machine keeps them" if isinstance(error, FolderTaken) else "see its log"
    message = f"This server keeps no files and batches: {reason}."
    return ApiError(ErrorReply(503, SERVER, message, code="batches_unavailable"))
