"""What stops a start is one line with code 2, in the doctor's words, before the port listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from config import Settings, load_settings
from engine import diagnose
from server.commands import serve
from tests.support.tiny_models import save_foreign_model, save_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, with one that is none, and with a folder that holds nothing."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model("llama", folder / "llama")
    save_foreign_model("bert", folder / "bert")
    save_foreign_model("classifier", folder / "classifier")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def listened(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets that a start has listened on."""
    found: list[socket.socket] = []
    monkeypatch.setattr(serve, "listen", found.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return found


def settings_for(models: Path, name: str, *flags: str) -> Settings:
    environ = {"SLIPSTREAM_HOME": str(models / "home")}
    flags = tuple(str(models / flag[1:]) if flag.startswith("@") else flag for flag in flags)
    return load_settings([str(models / name), "--port", "0", "--kv-cache-memory", "1MiB", *flags], environ)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("missing", (), "There is no directory "),
        ("lama", (), "; did you mean "),
        ("missing.gguf", (), "There is no file "),
        ("empty", (), "is no model directory: it has no config.json."),
        (
            "bert",
            (),
            "BertLMHeadModel cannot be served exactly: it is an encoder, made to read and not to write.",
        ),
        ("classifier", (), " gives 2 scores to a pair of texts, and one is served."),
        ("llama", ("--kv-cache-memory", "900TiB"), " of memory: lower --kv-cache-memory."),
        ("llama", ("--num-kv-blocks", "1000000000000"), " of memory: lower --num-kv-blocks."),
        ("llama", ("--kv-cache-memory", "1KiB"), "The KV cache is too small"),
        ("llama", ("--draft-model", "@nothing"), "/nothing: There is no directory "),
        ("llama", ("--draft-model", "@bert"), "/bert: BertLMHeadModel cannot be served exactly"),
    ],
)
def test_a_refused_start_is_the_doctors_line_before_the_port_listens(
    name: str,
    flags: tuple[str, ...],
    words: str,
    models: Path,
    listened: list[socket.socket],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = settings_for(models, name, *flags)
    assert serve.run(settings) == serve.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert line == f"slipstream: {diagnose(settings).problems[0]}"
    if "--draft-model" in flags:
        assert line.startswith("slipstream: --draft-model ")
    assert not listened
