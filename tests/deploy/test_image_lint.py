"""The files of the image by their formats' own rules; `make test-image` installs what checks them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.image
@pytest.mark.parametrize(
    "words",
    [
        ("hadolint", "Dockerfile"),
        ("check-jsonschema", "--builtin-schema=vendor.compose-spec", "deploy/compose.yaml"),
        ("shellcheck", "deploy/image/base.sh"),
    ],
    ids=lambda words: words[0],
)
def test_it_has_nothing_to_say(words: tuple[str, ...]) -> None:
    beside = Path(sys.executable).parent / words[0]
    tool = str(beside) if beside.is_file() else shutil.which(words[0])
    if tool is None:
        pytest.skip(f"{words[0]} is not installed")
    run = subprocess.run([tool, *words[1:]], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
