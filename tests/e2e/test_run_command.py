"""`slipstream run`: a model in this process, one answer or a conversation, and no server to start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from server.api.batches.records import StoredBatch, StoredFile
from server.api.batches.store import BatchStore
from server.commands import cli
from server.commands.run import split_words
from tests.e2e.command_line import QUIET, SLIPSTREAM
from tests.e2e.terminal import Terminal
from tests.e2e.test_batches import jsonl, line
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What makes it load a tiny model."""
    model = save_tiny_model("llama", tmp_path_factory.mktemp("run") / "tiny")
    return ("--model", str(model), "--served-model-name", "tiny", "--kv-cache-memory", "16MiB")


def in_pipe(*argv: str, question: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**QUIET, "HF_HUB_OFFLINE": "1", **environ}
    return subprocess.run(
        [*SLIPSTREAM, "run", *argv], input=question, capture_output=True, text=True, env=env, timeout=90
    )


@pytest.mark.slow
def test_a_question_in_a_pipe_gets_the_answer_and_nothing_else(flags: tuple[str, ...]) -> None:
    found = in_pipe(*flags, "--max-tokens=5", "--seed", "3", question="What is it?\n")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.strip()


def test_the_batches_that_a_server_has_left_open_are_left_to_the_next_server(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    store, content, end = BatchStore(tmp_path / "state"), tmp_path / "in", 2**40
    content.write_bytes(jsonl([line("a")]))  # for another model than this one
    store.add_file(StoredFile("file-1", "", "in", "batch", content.stat().st_size, 1, 0, end), content)
    batch = StoredBatch("batch_1", "", "file-1", "/v1/completions", "24h", "validating", 0, end)
    store.add_batch(batch, 10)
    store.close()
    found = in_pipe(*flags, "--max-tokens=5", question="What is it?\n", SLIPSTREAM_HOME=str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.strip()
    store = BatchStore(tmp_path / "state")
    assert store.find_batch("batch_1", "") == batch
    store.close()


def test_what_cannot_be_served_is_the_line_of_serve_and_code_2(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.observability.logs.configure_logging", lambda log: None)
    monkeypatch.setattr("engine.prepare_process", lambda: None)
    assert cli.main(["run", *flags, "--kv-cache-memory", "900TiB", "hello"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slipstream: Model and K/V take ") and err.count("\n") == 1


@pytest.mark.slow
async def test_a_conversation_needs_no_server(flags: tuple[str, ...]) -> None:
    with Terminal("run", *flags, "--max-tokens", "4", env={"HF_HUB_OFFLINE": "1"}) as terminal:
        await terminal.expect(r"loading tiny\n")
        await terminal.expect(r"tiny, in this process\. /help shows the commands, Ctrl-D ends\.\n> ")
        for _ in range(2):
            terminal.say("hello\n")
            await terminal.expect(r"\[\d tokens?, .*\]\n(.*\n)*> ")
        terminal.say("\x04")
        assert await terminal.end() == 0
    assert "warning" not in terminal.raw and "Traceback" not in terminal.raw


async def test_ctrl_c_while_it_loads_ends_it(flags: tuple[str, ...]) -> None:
    with Terminal("run", *flags, env={"HF_HUB_OFFLINE": "1"}) as terminal:
        await terminal.expect(r"loading tiny\n")
        terminal.say("\x03")
        assert await terminal.end() == 130


@pytest.mark.parametrize(
    ("argv", "own", "others"),
    [
        (["hi"], ["hi"], []),
        (["--dtype", "float32", "hi", "--seed", "3"], ["hi", "--seed", "3"], ["--dtype", "float32"]),
        (["--no-prefix-caching", "hi"], ["hi"], ["--no-prefix-caching"]),
        (["--model=m", "--temperature=0", "hi"], ["--temperature=0", "hi"], ["--model=m"]),
        (["--wrong", "hi"], ["hi"], ["--wrong"]),
        (["--seed"], ["--seed"], []),
        (["--model"], [], ["--model"]),
        (["--dtype", "float32", "--", "-1 + 1?"], ["--", "-1 + 1?"], ["--dtype", "float32"]),
    ],
)
def test_its_words_are_told_from_those_of_serve(argv: list[str], own: list[str], others: list[str]) -> None:
    assert split_words(argv) == (own, others)
