import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from server.observability import log_writer
from server.observability.log_writer import LogWriter


class Pipe:
    """A pipe that somebody else reads, or not."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()

    def fill(self) -> int:
        """Write until no more would fit; how many bytes that were."""
        os.set_blocking(self.sink, False)
        num_bytes = 0
        with suppress(BlockingIOError):
            while True:
                num_bytes += os.write(self.sink, b"x" * 4096)
        os.set_blocking(self.sink, True)
        return num_bytes

    def lines(self) -> list[str]:
        """What is left of the log once its writer has ended."""
        os.close(self.sink)
        with os.fdopen(self.source) as reader:
            return reader.read().splitlines()


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("test", logging.DEBUG)
    yield logger
    for handler in logger.handlers:
        handler.close()


def test_lines_arrive_whole_and_in_order(log: logging.Logger) -> None:
    pipe, texts = Pipe(), [f"line {i} größe" for i in range(500)]
    log.addHandler(LogWriter(pipe.sink))
    for text in texts:
        log.info(text)
    log.handlers[0].close()
    assert pipe.lines() == texts


def test_a_reader_that_stalls_costs_lines_and_never_time(log: logging.Logger) -> None:
    pipe = Pipe()
    num_filling = pipe.fill()
    log.addHandler(LogWriter(pipe.sink, max_waiting=100))
    start = time.monotonic()
    for i in range(20_000):
        log.info("%d", i)
    assert time.monotonic() - start < 10
    os.read(pipe.source, num_filling)
    log.handlers[0].close()
    lines = pipe.lines()
    kept = [int(line) for line in lines if line.isdigit()]
    assert len(kept) < 200
    assert kept[:90] == list(range(90))
    dropped = [int(line.split()[0]) for line in lines if line.endswith("dropped: their reader is too slow")]
    assert len(kept) + len(dropped) == len(lines)
    assert len(kept) + sum(dropped) == 20_000


def test_closing_does_not_wait_for_a_reader_that_stalls(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "CLOSE_S", 0.1)
    for num_lines in (1, 50):  # with room for the end mark, and without
        pipe = Pipe()
        writer = LogWriter(pipe.sink, max_waiting=10)
        log.handlers[:] = [writer]
        for _ in range(num_lines):
            log.info("x" * 100_000)
        start = time.monotonic()
        writer.close()
        assert 0.05 < time.monotonic() - start < 3
        os.close(pipe.source)  # lets the writer's thread end


def test_a_reader_that_has_gone_is_no_fault(log: logging.Logger) -> None:
    pipe = Pipe()
    writer = LogWriter(pipe.sink, max_waiting=10)
    log.addHandler(writer)
    os.close(pipe.source)
    for _ in range(1000):
        log.info("nobody reads this")
    writer.close()
    os.close(pipe.sink)


def test_a_disk_that_was_full_for_a_while_costs_the_lines_of_that_while(
    log: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [8, 3, 0, 0, 0]  # bytes that calls still find, then as many as they want

    def write_on_full_disk(fd: int, data: memoryview) -> int:
        most = room.pop(0) if room else len(data)
        if not most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:most])

    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(os, "write", write_on_full_disk)
    log.addHandler(LogWriter(file))
    for text in ("whole 1", "cut 2", "lost 3", "whole 4"):
        log.info(text)
    log.handlers[0].close()
    os.close(file)
    lines = (tmp_path / "log").read_text().splitlines()
    told = "2 log lines were lost: they could not be written"
    assert [line for line in lines if line.startswith("whole") or line == told] == [
        "whole 1",
        told,
        "whole 4",
    ]


def test_a_pipe_that_somebody_made_non_blocking_is_waited_for(log: logging.Logger) -> None:
    pipe = Pipe()
    os.set_blocking(pipe.sink, False)
    writer = LogWriter(pipe.sink)
    log.addHandler(writer)
    for i in range(100):
        log.info("%02d%s", i, "x" * 4000)
    with os.fdopen(os.dup(pipe.source)) as reader:
        assert [int(reader.readline()[:2]) for _ in range(100)] == list(range(100))
    writer.close()


BLOCKED = """
import asyncio, logging, os, sys
from config import LogSettings
from server.observability.logs import configure_logging
configure_logging(LogSettings(log_format="json"), never_waits=True)
async def main():
    for i in range(5000):
        logging.getLogger("slipstream.access").info("request", extra={"request_id": "x" * 100})
    await asyncio.sleep(0)
asyncio.run(main())
print("served", flush=True)
"""


@pytest.mark.slow
def test_a_process_whose_stderr_is_a_full_pipe_goes_on_and_ends() -> None:
    """Logging straight to stderr it would stop for ever at the 64th KiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "served\n"
    assert process.wait(30) == 0
    lines = process.stderr.read().splitlines()
    assert len(lines) > 100
    assert all(json.loads(line)["event"] == "request" for line in lines[:-1])  # the last one may be cut
    process.stdout.close()
    process.stderr.close()


CLOSED = """
import logging, os, sys
from server.commands import cli
from config import LogSettings
def use(argv):
    from server.observability.logs import configure_logging
    configure_logging(LogSettings(), never_waits=True)
    logging.getLogger("slipstream").warning("into nowhere")
    print("nor does this matter", file=sys.stderr)
    read, write = os.pipe()
    return 0 if min(read, write) > 2 else 9
cli.COMMANDS = {"use": use}
os._exit(cli.main(["use"]))
"""


def test_closed_standard_streams_are_no_fault_and_no_socket_takes_their_place() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(command, timeout=60).returncode == 0
