"""Conversions are kept once, whole or not at all, whoever races, crashes or runs out of room."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.compute.loading.conversion_store import convert_once
from engine.compute.loading.gguf_convert import convert_gguf
from engine.errors import StartRefused
from tests.support.tiny_gguf import save_tiny_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


def write(source: Path, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(source.read_bytes())


def visible(models: Path) -> list[Path]:
    """What a later start could take for a model, and unfinished ones; the lock files do no harm."""
    return sorted(path for path in models.glob("*") if path.suffix != ".lock")


def test_a_second_start_finds_what_the_first_one_made(source: Path, models: Path) -> None:
    calls: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        calls.append(directory)
        write(source, directory)

    first = convert_once(source, models, convert, 1)
    assert convert_once(source, models, convert, 1) == first
    assert first.parent == models
    assert first.name.startswith("a_model-")
    assert (first / "model.safetensors").read_bytes() == source.read_bytes()
    assert len(calls) == 1
    assert visible(models) == [first]


def test_another_user_can_read_it(source: Path, models: Path) -> None:
    directory = convert_once(source, models, write, 1)
    assert directory.stat().st_mode & 0o777 == 0o755
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", [0, 3500, 6999])
def test_a_changed_source_is_converted_anew(source: Path, models: Path, where: int) -> None:
    before = convert_once(source, models, write, 1)
    stat = source.stat()
    content = bytearray(source.read_bytes())
    content[where] ^= 1
    source.write_bytes(content)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert convert_once(source, models, write, 1) != before


def test_a_new_converter_converts_anew(source: Path, models: Path) -> None:
    assert convert_once(source, models, write, 1) != convert_once(source, models, write, 2)


def test_of_two_at_once_one_converts_and_the_other_waits(source: Path, models: Path) -> None:
    inside, waiting = threading.Event(), threading.Event()
    calls: list[Path] = []
    results: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        calls.append(directory)
        inside.set()
        assert waiting.wait(30)
        write(source, directory)

    def start() -> threading.Thread:
        thread = threading.Thread(target=lambda: results.append(convert_once(source, models, convert, 1)))
        thread.start()
        return thread

    with watched_log(lambda message: waiting.set() if "waiting" in message else None):
        first = start()
        assert inside.wait(30)
        second = start()
        first.join(30)
        second.join(30)
    assert len(calls) == 1
    assert len(results) == 2
    assert results[0] == results[1]


def test_a_failed_conversion_leaves_nothing_and_may_be_tried_again(source: Path, models: Path) -> None:
    def fail(source: Path, directory: Path) -> None:
        write(source, directory)
        raise StartRefused("no such architecture")

    with pytest.raises(StartRefused, match="no such architecture"):
        convert_once(source, models, fail, 1)
    assert visible(models) == []
    assert convert_once(source, models, write, 1).is_dir()


def test_what_a_killed_process_left_is_cleared_and_never_trusted(source: Path, models: Path) -> None:
    def convert(source: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()  # a process of its own would first import torch
    if child == 0:
        try:
            convert_once(source, models, convert, 1)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert len(visible(models)) == 1
    directory = convert_once(source, models, write, 1)
    assert (directory / "model.safetensors").read_bytes() == source.read_bytes()
    assert visible(models) == [directory]


def test_a_full_disk_is_one_line_and_no_directory(tmp_path: Path, models: Path) -> None:
    source = save_tiny_gguf(tmp_path / "tiny.gguf")
    with largest_file(50_000), pytest.raises(StartRefused) as refused:
        convert_once(source, models, convert_gguf, 1)
    assert str(refused.value).startswith(f"The converted model cannot be stored in {models}: ")
    assert "\n" not in str(refused.value)
    assert visible(models) == []
    assert convert_once(source, models, convert_gguf, 1).is_dir()


def test_a_home_that_cannot_be_written_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StartRefused, match=r"cannot be stored in .*home/models: Not a directory"):
        convert_once(source, tmp_path / "home" / "models", write, 1)


def test_a_home_that_cannot_be_looked_into_is_one_line(source: Path, tmp_path: Path) -> None:
    """As one of another user: the system refuses to say what is in there."""
    models = tmp_path / ("x" * 300) / "models"
    with pytest.raises(StartRefused, match=r"cannot be stored in .*x/models: File name too long"):
        convert_once(source, models, write, 1)


def test_a_source_that_cannot_be_read_is_one_line(models: Path, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"none\.gguf cannot be read: No such file"):
        convert_once(tmp_path / "none.gguf", models, write, 1)


@contextmanager
def watched_log(see: Callable[[str], None]) -> Iterator[None]:
    class Watcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            see(record.getMessage())

    log, watcher = logging.getLogger("slipstream.model"), Watcher()
    level = log.level
    log.addHandler(watcher)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(watcher)
        log.setLevel(level)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes fail, as they would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
