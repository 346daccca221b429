"""Converted models on disk: each made once, whole or not at all, however many processes want it.

A directory gets its name by one rename after everything in it is on disk, so whatever has a name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from engine.compute.loading.gguf_file import part_paths
from engine.compute.loading.model_files import first_line
from engine.errors import StartRefused

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("slipstream.model")

_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 8


def convert_once(source: Path, models: Path, convert: Callable[[Path, Path], None], version: int) -> Path:
    """The directory under `models` that `convert(source, directory)` has filled, converting if there is none.

    A changed source or another `version` of the converter gets another directory. Blocks while another
    process converts the same source. Raises StartRefused, leaving nothing behind, when it cannot be stored.
    """
    try:
        target = models / f"{_plain_name(source)}-{_fingerprint(source, version)}"
    except OSError as error:
        raise StartRefused(f"{source} cannot be read: {error.strerror}.") from error
    try:
        if target.is_dir():
            return target
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(target):
            if not target.is_dir():
                _fill(target, lambda staging: convert(source, staging))
    except (OSError, SafetensorError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise StartRefused(f"The converted model cannot be stored in {models}: {reason}.") from error
    return target


def _fill(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory beside `target`, then give it the name; nothing is left if that fails."""
    staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(target), dir=target.parent))
    try:
        write(staging)
        for path in [*staging.rglob("*"), staging]:
            # Staging and weights are made private, but who starts the server next may be another user.
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
        staging.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, then clear what a killed process left; the lock ends with its process.

    Without file locks two processes may both convert: the later rename fails, and no leftovers are cleared.
    """
    if sys.platform == "win32":
        yield
        return
    with open(target.parent / f".{target.name}.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is converting %s; waiting for it", target.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in target.parent.glob(f"{_staging_prefix(target)}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _staging_prefix(target: Path) -> str:
    """What the names of unfinished directories of `target` begin with."""
    return f".{target.name}.unfinished-"


def _plain_name(source: Path) -> str:
    """The file's name without its suffix, fit for a directory's name and for a glob pattern."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", source.stem).lstrip(".")[:80] or "model"


def _fingerprint(source: Path, version: int) -> str:
    """Tells contents apart without reading all: size, time of change, and evenly spread samples of the bytes.

    Reading everything would cost seconds at each start for files of many gigabytes.
    """
    digest = hashlib.sha256(f"{version}".encode())
    for path in [source, *filter(Path.exists, part_paths(source)[1:])]:
        stat = path.stat()
        digest.update(f" {stat.st_size} {stat.st_mtime_ns}".encode())
        step = max(1, (stat.st_size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(index * step)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _sync(path: Path) -> None:
    """Put a file's or directory's contents on disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
