"""`slipstream pull` and `models`, as processes, against a hub on this machine."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command_line import QUIET, SLIPSTREAM
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.tiny_gguf import save_tiny_gguf

PIECE = 10 << 20  # the hub's client writes so many bytes at once


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


def environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    ours = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(folder / "hub"),
        "SLIPSTREAM_HOME": str(folder / "home"),
    }
    return {**QUIET, **ours, "HF_HUB_OFFLINE": "0"}


def slipstream(*lines: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """These command lines in turn, in one process that imports once; the code of the last."""
    each = "[main(line.split()) for line in sys.argv[1:]]"
    program = f"import sys; from server.commands.cli import main; sys.exit({each}[-1])"
    command = [sys.executable, "-c", program, *lines]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=90)


@pytest.mark.slow
def test_a_killed_pull_goes_on_where_it_was_and_what_came_is_listed(hub: FakeHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    content = save_tiny_gguf(tmp_path / "t.gguf").read_bytes() + bytes(2 * PIECE)
    hub.repos["org/t"] = {"t-F32.gguf": content}
    hub.hold_after["t-F32.gguf"] = PIECE + 1000
    with subprocess.Popen([*SLIPSTREAM, "pull", "org/t:F32"], env=env, stderr=subprocess.PIPE) as process:
        assert hub.held.wait(60)
        begun = tmp_path / "hub/models--org--t/blobs" / f"{hashlib.sha256(content).hexdigest()}.incomplete"
        while begun.stat().st_size < PIECE:  # what is sent is not written yet
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    hub.hold_after.clear()
    found = slipstream("pull org/t:F32", "models", env=env)
    assert found.returncode == 0, found.stderr
    assert hub.ranges("t-F32.gguf") == [None, f"bytes={PIECE}-"]
    path, *lines = found.stdout.splitlines()
    assert Path(path).read_bytes() == content
    (line,) = (line for line in lines if line.startswith("org/"))
    name, size, stored, _, verdict = line.split("\t")
    assert (name, size, stored, verdict) == ("org/t:F32", str(len(content)), "GGUF F32", "yes")


@pytest.mark.slow
def test_no_network_is_one_line_and_code_2(hub: FakeHub, tmp_path: Path) -> None:
    env = {**environment(hub, tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    found = slipstream("pull org/t", env=env)
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("slipstream: org/t is neither a directory nor in the local cache.")
    assert "http://127.0.0.1:9 cannot be reached" in line
