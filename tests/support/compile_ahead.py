"""Compiles the kernels of the default tests while a core is idle: some tests wait for peers and clocks.

Run as a program behind `compile_once`, whose compiler keeps what it makes for the tests that ask for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory

LEAST_URGENT = 19


def start() -> Callable[[], None]:
    """Begin beside the tests; call what is returned at their end."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def stop() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)  # with the compiler that it has started
        process.wait()

    return stop


def main() -> None:
    """One after the other, in the order in which tests ask for them."""
    os.nice(LEAST_URGENT)
    from engine.compute.native.compiler import library
    from engine.compute.native.forms import NativeUnavailable, choose_build
    from tests.support.native import DEFAULT_BUILDS

    for dtype, form, formats in DEFAULT_BUILDS:
        # A home of its own for each: one with formats would serve for one without.
        with TemporaryDirectory() as home, suppress(NativeUnavailable):
            library(Path(home), choose_build(dtype, form, formats=formats))


if __name__ == "__main__":
    main()
