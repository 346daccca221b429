"""`slipstream train-drafter` and `train-medusa` before anything is loaded, and prompts from a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import StartRefused
from engine.training.prompts import builtin_prompts, read_prompts
from server.commands import cli


@pytest.mark.parametrize("argv", [["--help"], ["some/model", "-h", "--wrong"]])
def test_help_names_every_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train-medusa", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for flag in ("--output DIR", "--tokens", "--heads", "--minutes", "--prompts", "--dtype", "--device"):
        assert flag in out
    assert cli.main(["train-drafter", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for flag in ("--output DIR", "--tokens", "--steps", "--window", "--minutes", "--prompts", "--dtype"):
        assert flag in out


@pytest.mark.parametrize("command", ["train-drafter", "train-medusa"])
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "the following arguments are required: --output"),
        (["--output", "d", "--token", "9"], "unrecognized arguments: --token"),
        (["--output", "d", "a", "b"], "unrecognized arguments: b"),
        (["--output", "d", "--epochs", "0"], "'0' is not a whole number from 1 to 1000"),
        (["--output", "d", "--tokens", "1.5"], "'1.5' is not a whole number from 1 to 1e+09"),
        (["--output", "d", "--minutes", "nan"], "'nan' is not a number"),
        (["--output", "d", "--dtype", "float8"], "flag --dtype: model.dtype = 'float8' is not allowed"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    argv: list[str], reason: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert reason in err


LIGHT = """
import sys
from server.commands.cli import main
codes = [main(argv.split()) for argv in sys.argv[1:]]
heavy = {"torch", "transformers", "fastapi", "numpy", "engine"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert codes == [0, 2, 0, 2], codes
"""


def test_quick_answers_import_nothing_heavy() -> None:
    mistakes = " --output d --wrong"
    commands = [name + end for name in ("train-medusa", "train-drafter") for end in (" --help", mistakes)]
    ran = subprocess.run([sys.executable, "-c", LIGHT, *commands], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", ["train-drafter", "train-medusa"])
def test_a_model_that_is_not_there_is_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.observability.logs.configure_logging", lambda log: None)
    monkeypatch.setattr("engine.prepare_process", lambda: None)
    assert cli.main([command, str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("slipstream: There is no directory")
    assert not (tmp_path / "out").exists()


def test_builtin_prompts_are_many_distinct_and_settled_by_the_seed() -> None:
    first, again, other = builtin_prompts(0), builtin_prompts(0), builtin_prompts(1)
    assert first == again != other
    texts = [str(messages[0]["content"]) for messages in first]
    assert len(texts) == len(set(texts)) > 1500
    assert not any("{" in text and '"title"' not in text for text in texts)


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(
        'Tell me a story.\n\n{"prompt": "Hi"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    assert read_prompts(path) == [
        [{"role": "user", "content": "Tell me a story."}],
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ]


def test_lines_of_a_prompt_file_end_as_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes('{"prompt": "a\u2028b\x85c"}\r\nTell me.\r\n'.encode("utf-8-sig"))
    assert [messages[0]["content"] for messages in read_prompts(path)] == ["a\u2028b\x85c", "Tell me."]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n", "there is no prompt in it"),
        ("fine\n{]", "line 2: not valid JSON"),
        ('{"text": "x"}', "line 1: expected the key messages or prompt"),
        ('{"messages": []}', "line 1: expected the key messages or prompt"),
    ],
)
def test_prompt_files_that_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(StartRefused, match=reason):
        read_prompts(path)
    with pytest.raises(StartRefused, match="cannot be read"):
        read_prompts(tmp_path / "none")
