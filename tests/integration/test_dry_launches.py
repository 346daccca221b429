"""What models launch on a GPU is compiled for one, through the same calls; `make test-triton`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1800)]


def test_all_that_models_launch_compiles() -> None:
    """In a process of its own, where nothing is interpreted; see what it runs."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.dry_launches"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
