"""BatchStore: files and batches in one folder, of which SQLite keeps the account. For one thread.

A line counts as answered when its answer is committed. What is killed in between runs again, and its second
answer finds the first: the output has each line once. Output files are written from the database, in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

from server.api.batches.records import LONGEST_LIFE_S, OPEN_STATUSES, Line, Page, StoredBatch, StoredFile

if sys.platform != "win32":
    import fcntl

UNFINISHED: Final = ".part"
_SCHEMA_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, num_lines INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, input_file_id TEXT NOT NULL, endpoint TEXT NOT NULL,
    completion_window TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT,
    error_file_id TEXT, errors TEXT, metadata TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL, output_lifetime_s INTEGER NOT NULL
);
CREATE TABLE lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    length INTEGER NOT NULL, is_good INTEGER, answer BLOB, PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
CREATE INDEX unanswered ON lines (batch_id, number) WHERE answer IS NULL;
"""
_FROM_1: Final = (
    f"ALTER TABLE batches ADD COLUMN output_lifetime_s INTEGER NOT NULL DEFAULT {LONGEST_LIFE_S};"
)
_ENDED_AT: Final = "coalesce(completed_at, failed_at, expired_at, cancelled_at)"
_FILE_COLUMNS: Final = ", ".join(each.name for each in fields(StoredFile))
_BATCH_COLUMNS: Final = ", ".join(each.name for each in fields(StoredBatch))
_CODES: Final = {"expired": "batch_expired", "cancelled": "batch_cancelled"}
_REASONS: Final = {
    "expired": "The completion window ended before this request was answered.",
    "cancelled": "The batch was cancelled before this request was answered.",
}


class FolderTaken(Exception):
    """Another process keeps its files and batches in the folder."""


class NotListed(Exception):
    """A list cannot go on behind what is not in it."""


class BatchStore:
    """Opens `folder`, made if need be, for this process alone. Raises OSError, sqlite3.Error, FolderTaken."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        (folder / "files").mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(folder / "lock")
        try:
            database = folder / "batches.sqlite3"
            os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a commit lost with the power is made again
            self._make_tables()
            self._drop_strays()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        self._db.close()
        self._lock.close()

    def now(self) -> int:
        """Unix seconds."""
        return int(self._clock())

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.folder / "files" / file_id

    def new_file_id(self) -> str:
        """A fresh one, which is also the file's name."""
        return f"file-{uuid.uuid4().hex}"

    # Files.

    def add_file(self, file: StoredFile, content: Path) -> None:
        """Keep `content`, which is moved, under the file's id."""
        _flush(content)
        content.rename(self.path(file.id))
        with self._transaction():
            self._put_file(file)

    def find_file(self, file_id: str, tenant: str) -> StoredFile | None:
        """The tenant's file of this id, None if there is none or no longer."""
        self.drop_expired()
        query = f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND tenant = ?"
        row = self._db.execute(query, (file_id, tenant)).fetchone()
        return None if row is None else StoredFile(*row)

    def list_files(self, tenant: str, purpose: str | None, page: Page) -> list[StoredFile]:
        """The tenant's files, those of one purpose if it is given. Raises NotListed."""
        self.drop_expired()
        where, values = "tenant = ?", [tenant]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        return [StoredFile(*row) for row in self._listed("files", _FILE_COLUMNS, where, values, page)]

    def room_taken(self, tenant: str) -> tuple[int, int]:
        """How many files the tenant has, and how many bytes all tenants' files take."""
        self.drop_expired()
        own = self._db.execute("SELECT count(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()[0]
        return own, self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0]

    def user_of(self, file_id: str) -> str | None:
        """The batch that still reads the file."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})"
        row = self._db.execute(query, (file_id, *OPEN_STATUSES)).fetchone()
        return None if row is None else str(row[0])

    def delete_file(self, file_id: str) -> None:
        """Forget a file and its content."""
        with self._transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def drop_expired(self) -> None:
        """Forget files that are over and that no open batch reads, and batches a month after their end."""
        query = "SELECT id FROM files WHERE expires_at <= ?"
        for (file_id,) in self._db.execute(query, (self.now(),)).fetchall():
            if self.user_of(file_id) is None:
                self.delete_file(file_id)
        with self._transaction():
            query = f"DELETE FROM batches WHERE {_ENDED_AT} <= ?"
            self._db.execute(query, (self.now() - LONGEST_LIFE_S,))

    # Batches.

    def add_batch(self, batch: StoredBatch, most: int) -> None:
        """Keep a new batch, and of what its tenant has only the newest `most` and those that are open."""
        marks = ", ".join("?" * len(fields(StoredBatch)))
        beyond = f"""DELETE FROM batches WHERE tenant = ? AND {_ENDED_AT} IS NOT NULL AND rowid <=
            (SELECT rowid FROM batches WHERE tenant = ? ORDER BY rowid DESC LIMIT 1 OFFSET ?)"""
        with self._transaction():
            self._db.execute(f"INSERT INTO batches ({_BATCH_COLUMNS}) VALUES ({marks})", astuple(batch))
            self._db.execute(beyond, (batch.tenant, batch.tenant, most))

    def find_batch(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """The tenant's batch of this id, None if there is none or no longer."""
        self.drop_expired()
        found = self._batch(batch_id)
        return found if found is not None and found.tenant == tenant else None

    def list_batches(self, tenant: str, page: Page) -> list[StoredBatch]:
        """The tenant's batches. Raises NotListed."""
        self.drop_expired()
        rows = self._listed("batches", _BATCH_COLUMNS, "tenant = ?", [tenant], page)
        return [StoredBatch(*row) for row in rows]

    def open_batches(self) -> list[StoredBatch]:
        """Those that have not ended, the earliest to expire first."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE status IN ({marks}) ORDER BY expires_at, rowid"
        return [StoredBatch(*row) for row in self._db.execute(query, OPEN_STATUSES)]

    def change_batch(self, batch_id: str, status: str, errors: str | None = None) -> StoredBatch:
        """Give an open batch a new status and note when; one that has ended stays as it is."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        stamp = "" if status == "validating" else f", {status}_at = ?"
        values = [status, errors, *([self.now()] if stamp else []), batch_id, *OPEN_STATUSES]
        query = f"UPDATE batches SET status = ?, errors = ?{stamp} WHERE id = ? AND status IN ({marks})"
        with self._transaction():
            self._db.execute(query, values)
        return self._existing(batch_id)

    # Lines.

    def clear_lines(self, batch_id: str) -> StoredBatch:
        """Forget the lines that an interrupted validation has left, but not those that it has ended with."""
        query = """DELETE FROM lines WHERE batch_id = ?
            AND (SELECT in_progress_at FROM batches WHERE id = ?) IS NULL"""
        with self._transaction():
            self._db.execute(query, (batch_id, batch_id))
        return self._existing(batch_id)

    def add_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        """Keep lines to be answered."""
        query = "INSERT INTO lines (batch_id, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)"
        with self._transaction():
            self._db.executemany(query, [(batch_id, *astuple(line)) for line in lines])

    def begin(self, batch_id: str) -> StoredBatch:
        """All lines of a batch are valid: it is in progress, unless it was cancelled meanwhile."""
        query = """UPDATE batches SET status = 'in_progress', in_progress_at = ?,
            total = (SELECT count(*) FROM lines WHERE batch_id = batches.id)
            WHERE id = ? AND status = 'validating'"""
        with self._transaction():
            self._db.execute(query, (self.now(), batch_id))
        return self._existing(batch_id)

    def unanswered(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """The first lines behind number `after` that have no answer."""
        query = """SELECT number, custom_id, start, length FROM lines
            WHERE batch_id = ? AND answer IS NULL AND number > ? ORDER BY number LIMIT ?"""
        return [Line(*row) for row in self._db.execute(query, (batch_id, after, limit))]

    def answer(self, batch_id: str, number: int, answer: bytes, *, is_good: bool) -> bool:
        """Keep the answer of a line, in one transaction with the count; False when it has one already."""
        counter = "completed" if is_good else "failed"
        query = """UPDATE lines SET answer = ?, is_good = ?
            WHERE batch_id = ? AND number = ? AND answer IS NULL"""
        with self._transaction():
            is_new = self._db.execute(query, (answer, is_good, batch_id, number)).rowcount == 1
            if is_new:
                count = f"UPDATE batches SET {counter} = {counter} + 1 WHERE id = ?"
                self._db.execute(count, (batch_id,))
        return is_new

    def num_unanswered(self, until: int) -> int:
        """Lines without an answer of the batches that expire by then, those being validated included."""
        query = """SELECT coalesce(sum(CASE status WHEN 'in_progress' THEN total - completed - failed
                ELSE (SELECT num_lines FROM files WHERE files.id = input_file_id) END), 0)
            FROM batches WHERE status IN ('validating', 'in_progress') AND expires_at <= ?"""
        return int(self._db.execute(query, (until,)).fetchone()[0])

    def end_batch(self, batch_id: str, ending: str) -> StoredBatch:
        """Write the files of a batch and give it the status `ending`, in one transaction.

        Lines without an answer get an error that says why; where validation was not over, there are no lines.
        Killed before the end, it is done again; once it is done, nothing changes any more.
        """
        batch = self._existing(batch_id)
        if batch.status not in OPEN_STATUSES:
            return batch
        self.clear_lines(batch_id)
        if ending in _REASONS:
            self._refuse_rest(batch_id, ending)
        made = []
        for is_good, kind in ((True, "output"), (False, "errors")):
            file_id = _output_id(batch_id, kind)
            num_bytes, num_lines = self._write_answers(batch_id, is_good, self.path(file_id))
            if not num_lines:
                continue
            name, now = f"{batch_id}_{kind}.jsonl", self.now()
            expires = now + batch.output_lifetime_s
            made.append(
                StoredFile(file_id, batch.tenant, name, "batch_output", num_bytes, num_lines, now, expires)
            )
        by_name = {file.filename: file.id for file in made}
        with self._transaction():
            for file in made:
                self._put_file(file)
            self._db.execute(
                f"UPDATE batches SET status = ?, {ending}_at = ?, output_file_id = ?, error_file_id = ? "
                "WHERE id = ?",
                (
                    *(ending, self.now()),
                    *(by_name.get(f"{batch_id}_{kind}.jsonl") for kind in ("output", "errors")),
                    batch_id,
                ),
            )
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
        return self._existing(batch_id)

    def _refuse_rest(self, batch_id: str, ending: str) -> None:
        error = {"code": _CODES[ending], "message": _REASONS[ending]}
        query = "SELECT number, custom_id FROM lines WHERE batch_id = ? AND answer IS NULL"
        rows = self._db.execute(query, (batch_id,)).fetchall()
        with self._transaction():
            self._db.executemany(
                "UPDATE lines SET answer = ?, is_good = 0 WHERE batch_id = ? AND number = ?",
                [(answer_line(custom_id, None, error), batch_id, number) for number, custom_id in rows],
            )
            self._db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(rows), batch_id))

    def _write_answers(self, batch_id: str, is_good: bool, path: Path) -> tuple[int, int]:
        """Bytes and lines written, in the order of the input; without any there is no file."""
        query = "SELECT answer FROM lines WHERE batch_id = ? AND is_good = ? ORDER BY number"
        unfinished, num_bytes, num_lines = path.with_name(path.name + UNFINISHED), 0, 0
        try:
            with _new_file(unfinished) as file:
                for (answer,) in self._db.execute(query, (batch_id, is_good)):
                    num_bytes += file.write(answer)
                    num_lines += 1
            if num_lines:
                _flush(unfinished)
                unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return num_bytes, num_lines

    # The database.

    def _make_tables(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version in (0, 1):
            change = _FROM_1 if version else _SCHEMA
            self._db.executescript(f"BEGIN;{change}PRAGMA user_version = {_SCHEMA_VERSION};COMMIT;")
        elif version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its schema is {version}; this version reads {_SCHEMA_VERSION}")

    def _drop_strays(self) -> None:
        """Delete what was killed between being written and being kept."""
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in (self.folder / "files").iterdir():
            if path.name not in known and not path.is_dir():
                path.unlink()

    def _put_file(self, file: StoredFile) -> None:
        marks = ", ".join("?" * len(fields(StoredFile)))
        self._db.execute(f"INSERT OR REPLACE INTO files ({_FILE_COLUMNS}) VALUES ({marks})", astuple(file))

    def _batch(self, batch_id: str) -> StoredBatch | None:
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?"
        row = self._db.execute(query, (batch_id,)).fetchone()
        return None if row is None else StoredBatch(*row)

    def _existing(self, batch_id: str) -> StoredBatch:
        found = self._batch(batch_id)
        assert found is not None, f"there is no batch {batch_id}"
        return found

    def _listed(
        self, table: str, columns: str, where: str, values: Iterable[str], page: Page
    ) -> list[tuple[Any, ...]]:
        """Rows in the order of their making; one more than the limit where there are more."""
        sign, order = ("<", "DESC") if page.is_descending else (">", "ASC")
        given: list[object] = list(values)
        if page.after is not None:
            query = f"SELECT rowid FROM {table} WHERE {where} AND id = ?"
            row = self._db.execute(query, (*given, page.after)).fetchone()
            if row is None:
                raise NotListed
            where += f" AND rowid {sign} ?"
            given.append(row[0])
        query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY rowid {order} LIMIT ?"
        return self._db.execute(query, (*given, page.limit + 1)).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise


def answer_line(custom_id: str, response: bytes | None, error: dict[str, str] | None = None) -> bytes:
    """One line of an output file; `response` is JSON, which may be spread over lines."""
    head = json.dumps({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id})[:-1].encode()
    answered = b"null" if response is None else response.replace(b"\n", b" ").replace(b"\r", b" ")
    return head + b', "response": ' + answered + b', "error": ' + json.dumps(error).encode() + b"}\n"


def _output_id(batch_id: str, kind: str) -> str:
    """The same each time, so that what was written before a kill is written over."""
    return f"file-{hashlib.blake2b(f'{batch_id} {kind}'.encode(), digest_size=16).hexdigest()}"


def _locked(path: Path) -> BinaryIO:
    file = path.open("ab")
    if sys.platform == "win32":  # where two servers that are given one folder are not told apart
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderTaken(f"another process uses {path.parent}") from None
    except BaseException:
        file.close()
        raise
    return file


def _new_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
