"""`slipstream batch` against a server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.commands import batch as command_module
from tests.e2e.command_line import command
from tests.e2e.http_server import server_url
from tests.e2e.test_batches import jsonl, line
from tests.support.fake_engine import FakeEngine


async def test_a_file_is_submitted_looked_at_and_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_module, "_LOOK_EVERY_S", 0.01)
    requests = tmp_path / "my requests.jsonl"
    requests.write_bytes(jsonl([line("a"), line("b", temperature=9)]))
    async with server_url(FakeEngine(), state_dir=tmp_path / "state", api_key=("k",)) as url:
        flags = ("--url", url, "--api-key", "k")
        assert await command("batch", "submit", str(requests), "--wait", *flags) == 0
        told = capsys.readouterr()
        assert [json.loads(row)["custom_id"] for row in told.out.splitlines()] == ["a"]
        submitted, failed = told.err.splitlines()
        assert json.loads(failed)["custom_id"] == "b"
        assert await command("batch", "status", *flags) == 0
        batch_id, status, done, endpoint = capsys.readouterr().out.strip().split("\t")
        assert batch_id in submitted
        assert (status, done, endpoint) == ("completed", "1+1 of 2", "/v1/completions")
        assert await command("batch", "fetch", batch_id, *flags) == 0
        assert capsys.readouterr().out == told.out
        assert await command("batch", "cancel", batch_id, *flags) == 1
        assert "there is nothing to cancel" in capsys.readouterr().err


async def test_what_is_wrong_with_a_file_is_told_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_module, "_LOOK_EVERY_S", 0.01)
    requests = tmp_path / "wrong"
    requests.write_bytes(jsonl([line("a"), line("a")]))
    async with server_url(FakeEngine(), state_dir=tmp_path / "state") as url:
        assert await command("batch", "submit", str(requests), "--wait", "--url", url) == 1
        assert "line 2: The custom_id 'a' is that of an earlier line." in capsys.readouterr().err
        assert await command("batch", "submit", str(requests), "--url", url, "--window", "soon") == 1
        assert "completion_window" in capsys.readouterr().err
        requests.write_bytes(b"\n")
        assert await command("batch", "submit", str(requests), "--wait", "--url", url) == 1
        assert "slipstream: The file holds no requests." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit",), "submit needs a FILE"),
        (("fetch",), "fetch needs an ID"),
        (("submit", "/nowhere/at/all"), "cannot be read"),
        (("sbmit", "x"), "invalid choice"),
    ],
)
async def test_wrong_usage_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("batch", *words) == 2
    assert said in capsys.readouterr().err
