"""Docker or Podman, whichever answers here: images built, containers run, watched and stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.pip_configuration import PipConfiguration

ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"
CHECK_EVERY_S = 0.5  # each check is a process of its own, on the cores that the server starts on
BUILD_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 1800, 300, 120


def find_engine() -> ContainerEngine | None:
    """The first engine that works, None when there is none."""
    for command in ("docker", "podman"):
        if shutil.which(command) and subprocess.run([command, "info"], capture_output=True).returncode == 0:
            return ContainerEngine(command)
    return None


@dataclass(frozen=True)
class ContainerEngine:
    """One engine's command line. Every method raises RuntimeError, with what was printed, when that fails."""

    command: str

    def __call__(self, *words: str, timeout: float = 60) -> str:
        """Run `words` and return what was printed."""
        run = subprocess.run(
            [self.command, *words], capture_output=True, text=True, cwd=ROOT, timeout=timeout
        )
        if run.returncode:
            raise RuntimeError(
                f"{self.command} {' '.join(words)}: {run.returncode}\n{run.stdout}{run.stderr}"
            )
        return run.stdout.strip()

    def have_base(self) -> None:
        """Have the base image: here already, pulled, or else made from Debian's packages."""
        for words in (("image", "inspect", BASE), ("pull", BASE)):
            with suppress(RuntimeError):
                self(*words, timeout=BUILD_TIMEOUT_S)
                return
        script = ROOT / "deploy/image/base.sh"
        subprocess.run([script, self.command], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)

    def build(self, tag: str, target: str, pip: PipConfiguration) -> str:
        """Build a target of the Dockerfile and return its name."""
        # Podman's own format has no health checks; only its builder can be shown folders of this machine.
        own = ["--format", "docker", *pip.volumes()] if self.command == "podman" else []
        self("build", "--tag", tag, "--target", target, *own, *pip.secret(), ".", timeout=BUILD_TIMEOUT_S)
        return tag

    def inspect(self, image: str) -> dict[str, Any]:
        """What the engine knows of an image."""
        [facts] = json.loads(self("image", "inspect", image))
        assert isinstance(facts, dict)
        return facts

    @contextmanager
    def running(self, image: str, *options: str, flags: Sequence[str] = ()) -> Iterator[Container]:
        """A container that has been started and is gone afterwards."""
        container = Container(self, self("run", "--detach", *options, image, *flags).splitlines()[-1])
        try:
            yield container
        finally:
            self("rm", "--force", "--volumes", container.name)


@dataclass(frozen=True)
class Container:
    """One started container."""

    engine: ContainerEngine
    name: str

    def run(self, *words: str, timeout: float = 60) -> str:
        """Run a command in it and return what it printed. Raises RuntimeError when it fails."""
        return self.engine("exec", self.name, *words, timeout=timeout)

    def wait_ready(self, check: Sequence[str]) -> float:
        """Ask the health check until it is content; the seconds since the call. Raises RuntimeError."""
        start = time.monotonic()
        while True:
            try:
                self.run(*check)
                return time.monotonic() - start
            except RuntimeError as error:
                if time.monotonic() - start > START_TIMEOUT_S or not self._state()["Running"]:
                    raise RuntimeError(f"not ready: {self.logs()}") from error
                time.sleep(CHECK_EVERY_S)

    def stop(self) -> int:
        """Send the image's stop signal and return the exit code."""
        self.engine("stop", "-t", str(STOP_TIMEOUT_S), self.name, timeout=STOP_TIMEOUT_S + 30)
        code = self._state()["ExitCode"]
        assert isinstance(code, int)
        return code

    def logs(self) -> str:
        """Everything it has printed so far."""
        run = subprocess.run(
            [self.engine.command, "logs", self.name], capture_output=True, text=True, timeout=60
        )
        return run.stdout + run.stderr

    def _state(self) -> dict[str, Any]:
        [facts] = json.loads(self.engine("container", "inspect", self.name))
        state = facts["State"]
        assert isinstance(state, dict)
        return state
