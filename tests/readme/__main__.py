"""Follow a page: a fresh clone in a temporary folder, and each block of the page as a reader would take it.

The clone is of the last commit; all caches but pip's are empty, as on a new machine. A failure ends it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.readme.blocks import Block, PageError, Step, read_blocks, steps_of

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
_START_S, _STEP_S, _END_S = 900.0, 3600.0, 30.0


class Failed(Exception):
    """A block did not do what the page says."""


class Reader:
    """Does what the page says, in `folder`; `close` ends what it has started."""

    def __init__(self, clone: Path, home: Path, skipped: frozenset[str]) -> None:
        self._clone = clone
        self._skipped = skipped
        self._server: subprocess.Popen[bytes] | None = None
        known = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
        home.mkdir()
        (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")  # a 404 is no success
        self._env = known | {
            "PATH": f"{clone / '.venv/bin'}:{known['PATH']}",
            "CURL_HOME": str(home),
            "SLIPSTREAM_HOME": str(home / "slipstream"),
            "HF_HOME": str(home / "huggingface"),
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH", "VIRTUAL_ENV", "PYTHON"):
            self._env.pop(name, None)

    def follow(self, block: Block) -> None:
        """Do what one block is for. Raises Failed."""
        if block.file is not None:
            (self._clone / block.file).write_text(block.text)
            say(block.line, f"written to {block.file}")
        elif block.language == "python":
            say(block.line, "python")
            self._run(["python", "-c", block.text])
        elif block.language in ("sh", "bash"):
            for step in steps_of(block.text):
                self._take(block.line, step)
        else:
            say(block.line, f"{block.language}, to read only")

    def _take(self, line: int, step: Step) -> None:
        if step.is_server:
            say(line, step.script)
            self._serve(step.script)
            return
        lines = [each for each in step.script.split("\n") if each.split("#")[0].strip() not in self._skipped]
        if lines:
            say(line, *lines)
            self._run(["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)])

    def _run(self, command: list[str]) -> None:
        started = time.monotonic()
        ended = subprocess.run(
            command, cwd=self._clone, env=self._env, stdin=subprocess.DEVNULL, timeout=_STEP_S
        )
        print(f"\n    {ended.returncode} after {time.monotonic() - started:.0f} s", flush=True)
        if ended.returncode:
            raise Failed(f"exit code {ended.returncode}")

    def _serve(self, command: str) -> None:
        """Start a server in place of the one before, and return when it is ready."""
        self.close()
        started = time.monotonic()
        self._server = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._clone,
            env=self._env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        while not is_ready():
            if self._server.poll() is not None:
                raise Failed(f"the server ended with {self._server.returncode}")
            if time.monotonic() - started > _START_S:
                raise Failed(f"the server is not ready after {_START_S:.0f} s")
            time.sleep(0.5)
        print(f"    ready after {time.monotonic() - started:.0f} s", flush=True)

    def close(self) -> None:
        """End the server as Ctrl-C does. Raises Failed when it does not end well."""
        server, self._server = self._server, None
        if server is None:
            return
        os.killpg(server.pid, signal.SIGINT)
        try:
            code = server.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise Failed("the server does not end by Ctrl-C") from None
        if code not in (0, 130, -signal.SIGINT, 2):  # the server's own, or what make and the shell make of it
            raise Failed(f"the server ended with {code}")


def is_ready() -> bool:
    """Whether a server answers that it is."""
    try:
        with urllib.request.urlopen(f"{URL}/health/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def say(line: int, *words: str) -> None:
    """Tell what comes next, and where it stands."""
    print(*(f"[line {line}] {word}" for word in words), sep="\n", flush=True)


def main() -> int:
    """Follow the page that the command line names; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.readme", description=__doc__)
    parser.add_argument("page", nargs="?", default="README.md", help="of the clone (default: README.md)")
    parser.add_argument("--skip", action="append", default=[], metavar="COMMAND", help="leave this one out")
    values = parser.parse_args()
    if is_ready():
        print(f"something answers on {URL} already", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="slipstream-readme-") as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        reader = Reader(clone, Path(folder, "home"), frozenset(values.skip))
        try:
            for block in read_blocks((clone / values.page).read_text()):
                reader.follow(block)
            reader.close()
        except (Failed, PageError, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        finally:
            try:
                reader.close()
            except Failed as error:
                print(f"FAILED: {error}", file=sys.stderr)
    print("every block does what the page says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
