"""`python -m tests.gpu` runs tests without this project's plugins, and loses none of what became of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import __main__ as here

CASES = """
import os
import pytest

def test_right(): assert True
def test_wrong(): assert 1 == 2, "not equal"
@pytest.mark.skip(reason="no device")
def test_left_out(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(here, "NEEDED", {"pytest": "pytest"})
    (tmp_path / "test_some.py").write_text(CASES)
    return tmp_path


def run(folder: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and what became of each test."""
    file = folder / "results" / "outcomes.json"
    code = here.main(["--tests", str(folder), "--json", str(file), "--processes", "2"])
    tests = json.loads(file.read_text())["tests"]
    return code, {each["name"].split("::")[-1]: (each["outcome"], each["message"]) for each in tests}


@pytest.mark.slow
def test_every_outcome_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, outcomes = run(folder)
    assert code == here.FAILED
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_left_out": "skipped",
    }
    assert "not equal" in outcomes["test_wrong"][1] and "no device" in outcomes["test_left_out"][1]
    assert "1 failed, 1 passed, 1 skipped" in capfd.readouterr().out


def test_a_process_that_dies_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "test_some.py").write_text(CASES.replace('assert 1 == 2, "not equal"', "os._exit(0)"))
    monkeypatch.setattr(here, "_collect", lambda *_: ["test_some.py::test_wrong"])
    assert run(folder)[0] == here.FAILED


def test_what_is_missing_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "NEEDED", {"pytest": "pytest", "no_such_module": "no-such-package"})
    assert here.main(["--tests", str(folder)]) == here.REFUSED
    assert "missing: no-such-package\n" in capsys.readouterr().err


def test_what_is_too_old_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(here, "NEEDED", {"pytest": "pytest>=999"})
    assert here.main(["--tests", str(folder)]) == here.REFUSED
    assert "missing: pytest>=999\n" in capsys.readouterr().err
