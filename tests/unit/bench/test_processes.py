"""Child processes: answers, time limits, deaths, and that none is left behind."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tests.bench import processes
from tests.bench.processes import Child, ChildFailed, JsonWorker, NoAnswer, Server, free_port

SILENT = "import sys, time; print('begun', file=sys.stderr, flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


def worker(code: str) -> JsonWorker:
    made = JsonWorker("unused")
    made._command = [sys.executable, "-c", code]
    return made


def test_a_worker_answers_and_is_ended() -> None:
    burst = {"host": "127.0.0.1", "port": free_port(), "bodies": [], "timeout_s": 5}
    with JsonWorker("tests.bench.load_client") as client:
        assert client.ask(burst, timeout_s=30) == {"records": []}
        with pytest.raises(ChildFailed, match="no connection"):
            client.ask({**burst, "bodies": [{}]}, timeout_s=30)
        process = client.process
    assert process.returncode is not None


def test_a_worker_that_takes_too_long_times_out_and_is_ended() -> None:
    with worker(SILENT) as silent:
        with pytest.raises(NoAnswer, match="no answer"):
            silent.ask({}, timeout_s=0.05)
        process = silent.process
    assert process.returncode is not None


def test_a_worker_that_dies_shows_its_last_words() -> None:
    with worker("raise SystemExit('last words')") as dying, pytest.raises(ChildFailed, match="last words"):
        dying.ask({}, timeout_s=30)


def test_a_child_that_is_paused_answers_once_it_is_resumed_and_can_be_ended_before() -> None:
    with worker("print(input(), flush=True)\nprint(input(), flush=True)") as echo:
        assert echo.ask({"answer": 1}, timeout_s=30) == {"answer": 1}
        echo.pause()
        with pytest.raises(NoAnswer):
            echo.ask({"answer": 2}, timeout_s=0.2)
        echo.resume()
        assert echo._answers.get(timeout=30) == '{"answer": 2}\n'
    with worker("input()") as echo:
        echo.pause()
        process = echo.process
    assert process.returncode is not None


def test_a_child_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    with Child([sys.executable, "-c", STUBBORN], piped=True) as stubborn:
        assert stubborn.process.stdout is not None
        assert stubborn.process.stdout.readline() == "1\n"  # it ignores the signal from here on
        process = stubborn.process
    assert process.returncode == -9


def test_what_a_child_started_ends_with_it() -> None:
    code = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}],"
        " stdout=subprocess.PIPE).pid, flush=True); sys.stdin.read()"
    )
    with Child([sys.executable, "-c", code], piped=True) as child:
        assert child.process.stdout is not None
        grandchild = int(child.process.stdout.readline())
        assert is_running(grandchild)
    wait_for_exit(grandchild)


def test_a_server_that_cannot_start_is_a_failure_with_its_reason() -> None:
    with Server("--no-such-flag") as server, pytest.raises(ChildFailed, match="no-such-flag"):
        server.wait_ready(timeout_s=60)


def test_children_are_ended_when_the_benchmarks_are_terminated() -> None:
    code = (
        "import sys, time; from tests.bench.processes import Child, end_in_order; end_in_order()\n"
        f"with Child([sys.executable, '-c', {SILENT!r}], piped=False) as child:\n"
        "    print(child.process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(30) == 143
    assert not is_running(pid)


def wait_for_exit(pid: int) -> None:
    """A killed grandchild is gone once its new parent has seen it."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(30)


def is_running(pid: int) -> bool:
    return subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode == 0
