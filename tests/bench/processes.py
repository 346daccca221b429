"""Child processes of the benchmarks: the server under test and the workers, each ended whatever happens."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

from tests.bench.streams import BenchmarkFailed

STOP_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 180.0
READY_POLL_S = 0.01
TAIL_BYTES = 2000
TERMINATED = 143


class ChildFailed(BenchmarkFailed):
    """A child process ended, or answered an error; the message has the end of its stderr."""


class NoAnswer(BenchmarkFailed):
    """A worker did not answer in the time it was given; it is still at it."""


class Child:
    """A process whose stderr is kept in a file that is nowhere; ended on leaving the context."""

    def __init__(self, command: Sequence[str], *, piped: bool, env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._piped = piped
        self._env = env  # None: this process's own
        self._stderr = TemporaryFile()  # noqa: SIM115 - open for as long as the child is
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE if self._piped else subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
            env=self._env,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._stderr.close()

    @property
    def process(self) -> subprocess.Popen[str]:
        """The running process; only inside the context."""
        assert self._process is not None, "the child was not started"
        return self._process

    def pause(self) -> None:
        """Stop it and its children where they are: until `resume` they take no CPU time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)  # it leads a group of its own

    def end(self) -> None:
        """Ask it to stop, wait, then kill it."""
        self.resume()
        if self.process.stdin is not None:
            with suppress(OSError):  # what it had not read yet
                self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError):  # there is mostly nothing left of it
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stderr_lines(self) -> Iterator[str]:
        """What it wrote to stderr, once it has ended; in the context."""
        self._stderr.seek(0)
        for line in self._stderr:
            yield line.decode(errors="replace")

    def failed(self, what: str) -> ChildFailed:
        """An error that says `what` and shows the end of the child's stderr."""
        size = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, size - TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace")
        return ChildFailed(f"{' '.join(self._command[-3:])}: {what}; its stderr ends with:\n{tail}")


class JsonWorker(Child):
    """A Python module of ours that answers one line of JSON with one line of JSON.

    `before` starts it: another Python, say, for what cannot be installed beside us.
    """

    def __init__(self, module: str, *arguments: str, before: Sequence[str] = (sys.executable, "-m")) -> None:
        super().__init__([*before, module, *arguments], piped=True)
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        super().__enter__()
        threading.Thread(target=self._read, name="bench-worker-answers", daemon=True).start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Its answer. Raises NoAnswer after `timeout_s`, ChildFailed when it died or had an error."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise NoAnswer(f"{self._command[-1]} gave no answer within {timeout_s:.0f} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise self.failed("it has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failed(str(answer["error"]))
        return answer


class HttpChild(Child):
    """A server on a free port of 127.0.0.1; `ready_path` answers 200 once it serves."""

    host = "127.0.0.1"

    def __init__(
        self, command: Sequence[str], port: int, ready_path: str, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(command, piped=False, env=env)
        self.port = port
        self._ready_path = ready_path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when it says that it is ready. Raises ChildFailed when it ends first or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self.process.poll() is not None:
                raise self.failed(f"it ended with code {self.process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise self.failed(f"it was not ready within {timeout_s:.0f} s")
            time.sleep(READY_POLL_S)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", self._ready_path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Server(HttpChild):
    """`slipstream serve` with the flags given and otherwise its defaults."""

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        port = free_port()
        address = ["--host", self.host, "--port", str(port), "--log-level", "warning"]
        command = [*slipstream_command(), "serve", *address, *flags]
        super().__init__(command, port, "/health/ready", env)


def end_in_order() -> None:
    """Leave every context when this process is told to terminate, so that its children end, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


def slipstream_command() -> list[str]:
    """The installed command beside this Python, or the module when there is none."""
    script = Path(sys.executable).with_name("slipstream")
    if script.exists():
        return [str(script)]
    return [sys.executable, "-c", "import sys; from server.commands.cli import main; sys.exit(main())"]


def free_port() -> int:
    """A port nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
