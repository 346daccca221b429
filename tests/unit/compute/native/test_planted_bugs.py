"""The bugs that sanitizers are tried by can be planted; whether they are found `make test-slow` shows."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest

from engine.compute.native import compiler
from tests.support.sanitized import BUGS


@pytest.mark.parametrize("bug", BUGS)
def test_the_sources_still_say_what_a_planted_bug_changes(bug: str, tmp_path: Path) -> None:
    folder = Path(copytree(compiler.SOURCE.parent, tmp_path / "native"))
    before = (folder / BUGS[bug].file).read_text()
    BUGS[bug].plant(folder)
    assert (folder / BUGS[bug].file).read_text() != before
