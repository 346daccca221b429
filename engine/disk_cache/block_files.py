"""BlockFiles: the contents of K/V blocks in a directory, one file a block, found by name.

A file has its name only when it is whole, and ends in a digest of its name and its contents: what does not
match is deleted and counts as never written. So neither a killed process nor a loss of power leaves anything
that could be taken for K/V, and nothing has to be forced to disk: what is lost is computed again. Processes
share a directory without knowing of each other, since every change of it is one rename or one unlink.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Protocol

import xxhash

from engine.errors import StartRefused
from engine.loop.daemon_executor import DaemonExecutor

log = logging.getLogger("slipstream.engine")

_FORMAT = 1  # of a file; another one has directories of its own
_DIGEST_BYTES = 16
_FAN_OUT = 2  # hexadecimal digits of a name that choose its directory
_UNFINISHED = ".unfinished-"
_MAX_PIECES = 512  # of a call; systems take 1,024
_LEFT_AFTER_EVICTION = 0.9  # of the budget, or of what a smaller disk holds
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RECOUNT_SHARE = 1 / 32  # of the budget: having written so much, see what other processes wrote


class Blocks(Protocol):
    """Where the bytes of blocks are in memory; see BlockBytes of engine.compute.attention."""

    batch: int
    block_bytes: int

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """What they hold."""

    def incoming(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """Where to put what they are to hold."""

    def accept(self, block_ids: Sequence[int]) -> None:
        """It has been put there."""


def private_directory(directory: Path) -> Path:
    """The directory, made if there is none, that only this user can enter. Raises StartRefused."""
    if sys.platform == "win32":
        raise StartRefused("--prefix-cache-dir is not available on Windows.")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise StartRefused(f"--prefix-cache-dir {directory}: {error.strerror}.") from error
    if found.st_uid != os.geteuid():
        raise StartRefused(
            f"--prefix-cache-dir {directory} belongs to user {found.st_uid} and this is user {os.geteuid()}: "
            "its owner could change what a prompt is taken to say. Give a directory of your own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StartRefused(
            f"--prefix-cache-dir {directory} is open to other users (mode {stat.S_IMODE(found.st_mode):o}): "
            f"prompts could be read there. Close it: chmod 700 {directory}"
        )
    return directory


class BlockFiles:
    """The blocks of one kind of K/V, told from others by `fingerprint`, within a directory's `max_bytes`.

    The budget is for all that is in the directory, of whichever kind: what was of no use for longest goes.
    `count_stored` and `read` are for one thread, which another helps; all else is for a third.
    """

    def __init__(self, directory: Path, fingerprint: str, blocks: Blocks, max_bytes: int) -> None:
        self._root = directory
        self._directory = directory / f"v{_FORMAT}-{fingerprint}"
        self._seed = fingerprint.encode()
        self._blocks = blocks
        self._max_bytes = max_bytes
        self._num_bytes = self._uncounted = max_bytes  # in the directory, as far as known: count first
        self._unfinished = f"{_UNFINISHED}{secrets.token_hex(8)}"  # a process's number is that of others, too
        self._serial = count()
        self._helper = DaemonExecutor("disk-read-beside")

    def count_stored(self, names: Sequence[bytes]) -> int:
        """How many of these are there, from the first on without a gap."""
        for i, name in enumerate(names):
            if not os.path.exists(self._spelled(name)):
                return i
        return len(names)

    def read(self, block_ids: Sequence[int], names: Sequence[bytes]) -> int:
        """Fill blocks with these contents; how many are good, from the first on. The others hold anything."""
        num_good = 0
        for first in range(0, len(names), self._blocks.batch):
            batch = slice(first, first + self._blocks.batch)
            wanted = list(zip(names[batch], self._blocks.incoming(block_ids[batch]), strict=True))
            half = len(wanted) // 2
            rest = self._helper.submit(self._read_blocks, wanted[half:])  # copying it needs no interpreter
            try:
                num_here = self._read_blocks(wanted[:half])
            finally:
                wait([rest])  # before anybody else may have these blocks
            num_rest = rest.result()
            num_here += num_rest if num_here == half else 0
            num_good += num_here
            self._blocks.accept(block_ids[first:num_good])
            if num_here < len(wanted):
                break
        return num_good

    def close(self) -> None:
        """Nothing is read any more."""
        self._helper.shutdown(wait=False)

    def _read_blocks(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> int:
        """How many are good, from the first on."""
        for i, (name, pieces) in enumerate(wanted):
            if not self._read_block(name, pieces):
                return i
        return len(wanted)

    def _read_block(self, name: bytes, pieces: Sequence[memoryview]) -> bool:
        path, digest = self._spelled(name), bytearray(_DIGEST_BYTES)
        try:
            with _opened(path, os.O_RDONLY) as file:
                found = os.fstat(file)
                is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                is_whole = is_ours and found.st_size == self._blocks.block_bytes + _DIGEST_BYTES
                is_whole = is_whole and _transfer(os.preadv, file, [*pieces, memoryview(digest)])
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            is_whole = False  # a bad sector stays bad
        if is_whole and self._digest(name, pieces) == digest:
            return True
        log.warning("a file of the prefix cache is damaged and deleted: %s", name.hex())
        with suppress(FileNotFoundError):
            os.unlink(path)
        return False

    def write(
        self, block_ids: Sequence[int], names: Sequence[bytes], is_unchanged: Callable[[int], bool]
    ) -> int:
        """Store what these blocks hold, unless it is there or a block is changed meanwhile; how many were.

        Raises OSError; a full disk has room for the next ones then, or there is nothing here to delete.
        """
        num_written = 0
        for first in range(0, len(names), self._blocks.batch):
            batch = slice(first, first + self._blocks.batch)
            new = [pair for pair in zip(block_ids[batch], names[batch], strict=True) if self._is_new(pair[1])]
            pieces = self._blocks.outgoing([block_id for block_id, _ in new])
            for (block_id, name), own in zip(new, pieces, strict=True):
                try:
                    num_written += self._write_block(name, own, lambda: is_unchanged(block_id))  # noqa: B023
                except OSError as error:
                    if error.errno in _FULL:
                        files = self._recount()
                        self._evict(files, self._num_bytes)
                    raise
        self._count(num_written * (self._blocks.block_bytes + _DIGEST_BYTES))
        return num_written

    def _is_new(self, name: bytes) -> bool:
        return not os.path.exists(self._spelled(name))

    def _write_block(
        self, name: bytes, pieces: Sequence[memoryview], is_unchanged: Callable[[], bool]
    ) -> bool:
        path = self._path(name)
        staging = path.parent / f"{self._unfinished}-{next(self._serial)}"
        for directory in (self._directory, path.parent):
            directory.mkdir(mode=0o700, exist_ok=True)
        try:
            with _opened(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                digest = memoryview(self._digest(name, pieces))
                if not _transfer(os.pwritev, file, [*pieces, digest]):
                    raise OSError(errno.ENOSPC, "the file system takes no more")
            # Not before the bytes were read: they are what the name says only if nobody has written since.
            if is_unchanged():
                staging.rename(path)
                return True
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        staging.unlink()
        return False

    def touch(self, names: Sequence[bytes]) -> None:
        """These are of use: they are the last to go, the first of them last of all."""
        for name in reversed(names):
            with suppress(FileNotFoundError):
                os.utime(self._spelled(name))

    def forget(self, tag: bytes) -> None:
        """Delete the contents whose names begin so."""
        for path in self._directory.glob(f"*/{tag.hex()}*"):
            path.unlink(missing_ok=True)

    def _count(self, num_bytes: int) -> None:
        """So much was written: make room in time, other processes' files counted."""
        self._num_bytes += num_bytes
        self._uncounted += num_bytes
        if self._num_bytes < self._max_bytes and self._uncounted < self._max_bytes * _RECOUNT_SHARE:
            return
        files = self._recount()
        if self._num_bytes > self._max_bytes:
            self._evict(files, self._max_bytes)

    def _recount(self) -> list[tuple[int, int, str]]:
        """All there is, what was of no use for longest first."""
        files = sorted(self._files())
        self._num_bytes, self._uncounted = sum(size for _, size, _ in files), 0
        return files

    def _evict(self, files: Sequence[tuple[int, int, str]], max_bytes: int) -> None:
        """Delete the first of all there is, until some of `max_bytes` is free."""
        for _, size, path in files:
            if self._num_bytes <= max_bytes * _LEFT_AFTER_EVICTION:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._num_bytes -= size

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, bytes and path of all there is, with what killed processes left unfinished."""
        for directory in self._root.glob("v*/*/"):
            with suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime_ns, found.st_size, entry.path

    def _path(self, name: bytes) -> Path:
        return Path(self._spelled(name))

    def _spelled(self, name: bytes) -> str:
        """Its path; a Path takes as long to make as the file to open."""
        spelled = name.hex()  # its end is a hash, and its beginning may be one tenant's
        return f"{self._directory}/{spelled[-_FAN_OUT:]}/{spelled}"

    def _digest(self, name: bytes, pieces: Sequence[memoryview]) -> bytes:
        digest = xxhash.xxh3_128(self._seed + name)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


@contextmanager
def _opened(path: Path | str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, pieces: Sequence[memoryview]
) -> bool:
    """Read or write all pieces, one behind another from the file's start; False if it ends before that."""
    offset = 0
    for first in range(0, len(pieces), _MAX_PIECES):
        part = pieces[first : first + _MAX_PIECES]
        wanted = sum(piece.nbytes for piece in part)
        if call(file, part, offset) != wanted:
            return False
        offset += wanted
    return True
