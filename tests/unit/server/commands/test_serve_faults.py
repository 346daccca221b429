"""The fault plan at the start: read, told of, or refused, before anything is bound or loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from config import PlannedFault, load_settings
from server.commands import cli
from server.commands.serve import run

PLAN = '[{"point": "logits_nan"}, {"point": "forward_raise", "at": 2}]'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[PlannedFault]]:
    """The faults that servers were started with."""
    found: list[Sequence[PlannedFault]] = []

    async def start(settings: Any, faults: Sequence[PlannedFault], *_: Any) -> int:
        found.append(faults)
        return 0

    monkeypatch.setattr("server.commands.serve._serve", start)
    return found


def start(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return run(load_settings(["--port", "0"], {}))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_plan_that_is_allowed_is_followed_and_told_of(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start({"SLIPSTREAM_FAULT_PLAN": PLAN, "SLIPSTREAM_ALLOW_FAULTS": "1"}, monkeypatch)
    assert started == [(PlannedFault("logits_nan"), PlannedFault("forward_raise", at=2))]
    (line,) = warnings_in(caplog)
    assert line.endswith("on purpose, by SLIPSTREAM_FAULT_PLAN: forward_raise, logits_nan")


@pytest.mark.parametrize("plan", [PLAN, "nonsense"])
def test_a_plan_that_is_not_allowed_is_ignored_with_one_warning(
    plan: str, started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start({"SLIPSTREAM_FAULT_PLAN": plan}, monkeypatch)
    assert started == [()]
    (line,) = warnings_in(caplog)
    assert line.startswith("SLIPSTREAM_FAULT_PLAN is ignored")


def test_without_a_plan_nothing_is_said(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start({"SLIPSTREAM_ALLOW_FAULTS": "1"}, monkeypatch)
    assert (started, warnings_in(caplog)) == ([()], [])


def test_a_wrong_plan_is_wrong_usage_in_one_line(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_FAULT_PLAN", '[{"point": "forward_rise"}]')
    monkeypatch.setenv("SLIPSTREAM_ALLOW_FAULTS", "1")
    monkeypatch.setattr("server.observability.logs.configure_logging", lambda *_, **__: None)
    assert cli.main(["serve", "--port", "0"]) == cli.WRONG_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "slipstream: env SLIPSTREAM_FAULT_PLAN: entry 1: point = 'forward_rise' is not allow"
    )
    assert not started
