"""How `slipstream models` prints what there is, and what `slipstream pull` refuses."""

from __future__ import annotations

import json

import pytest

import engine
from engine import StartRefused, StoredModel
from server.commands import cli, models

FOUND = [
    StoredModel("org/a", None, "Hugging Face cache", "/c/a", 3 << 20, "safetensors BF16", 0.0, None),
    StoredModel("org/b", "v2", "Hugging Face cache", "/c/b", 5, "-", 86400.0, "It has\tno weights."),
]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "list_models", lambda home: (FOUND, ["a repo is damaged"]))


def test_in_a_pipe_each_model_is_a_line_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    assert [line[:3] + line[4:] for line in lines] == [
        ["org/a", str(3 << 20), "safetensors BF16", "yes"],
        ["org/b --revision v2", "5", "-", "It has no weights."],
    ]
    assert err == "slipstream: a repo is damaged\n"


def test_json_has_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["size_bytes"], first["reason"]) == ("org/a", 3 << 20, None)
    assert second["revision"] == "v2"


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    models._show(FOUND)
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "FORMAT", "LAST", "USE", "CAN", "BE", "SERVED"]
    assert first.split()[:5] == ["org/a", "3", "MiB", "safetensors", "BF16"]
    models._show([])
    assert "slipstream pull fetches one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["pull"], "pull: the following arguments are required: REPO"),
        (["pull", "a/b", "--revison", "x"], "flag --revison: unknown flag; did you mean --revision?"),
        (["pull", "smollm2-135m-instruct"], "smollm2-135m-instruct is built in: there is nothing to pull."),
        (["pull", "."], ". is a path: only a Hugging Face repo can be pulled."),
        (["pull", "a/b/c"], "There is no directory a/b/c, and it is no Hugging Face repo id"),
        (["models", "x"], "models: 'x' is one word too many"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_pull_prints_the_path_alone_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(engine, "pull_model", lambda name, revision: tmp_path)
    assert cli.main(["pull", "org/a"]) == 0
    assert capsys.readouterr() == (f"{tmp_path}\n", "org/a: 0 MiB, whole and checked\n")
    refusal = StartRefused("no")
    monkeypatch.setattr(engine, "pull_model", lambda name, revision: (_ for _ in ()).throw(refusal))
    assert cli.main(["pull", "org/a"]) == 2
