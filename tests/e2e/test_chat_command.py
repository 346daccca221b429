"""`slipstream chat` against servers on real sockets."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from pathlib import Path

import pytest

from engine import SpecStats
from tests.e2e.command_line import command, fast_engine
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.scripted_server import DONE, chunk, reply, scripted_server
from tests.e2e.terminal import Terminal

GOOD = reply(chunk("a") + chunk("b", "stop") + DONE, "200 OK", "content-type: text/event-stream")


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


async def test_a_question_in_a_pipe_gets_the_answer_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = fast_engine()
    pipe_in(monkeypatch, "Wie geht's?\n")
    async with server_url(engine) as url:
        flags = ("--max-tokens", "12", "--temperature", "0", "--seed", "4", "--system", "Be short.")
        assert await command("chat", "--url", url, *flags) == 0
    assert capsys.readouterr() == ("<system>Be s\n", "")
    assert [message["role"] for message in engine.messages] == ["system", "user"]
    assert engine.messages[1]["content"] == "Wie geht's?"
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (12, 0.0, 4)


async def test_a_message_gets_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    async with server_url(fast_engine()) as url:
        assert await command("chat", "--url", url, "--max-tokens", "8", "--temperature", "0", "hello") == 0
    assert capsys.readouterr().out == "<user>he\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--max-tokens", "9999"), "HTTP 400: This model's maximum context length is 4096 tokens."),
        (("--model", "other"), "HTTP 404: The model 'other' does not exist"),
    ],
)
async def test_a_refused_question_is_one_line_and_code_1(
    flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with server_url(fast_engine()) as url:
        assert await command("chat", "--url", url, *flags, "hello") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"slipstream: chat: {line}") and err.count("\n") == 1


async def test_the_servers_key_is_used_here_and_sent_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "first,still-first")
    async with scripted_server(GOOD) as script:
        assert await command("chat", "--url", script.url, "--model", "m", "hello") == 0
        assert await command("chat", "--url", script.url, "--model", "m", "--api-key", "own", "hello") == 0
    assert capsys.readouterr().out == "ab\nab\n"
    heads = [head for head, _ in script.requests]
    assert "authorization: Bearer first,still-first\r\n" in heads[0]
    assert "authorization: Bearer own\r\n" in heads[1]


async def test_nothing_asked_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, " \n")
    assert await command("chat", "--url", "http://127.0.0.1:1") == 2
    assert capsys.readouterr().err == "slipstream: chat: nothing was asked\n"


async def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    stats = SpecStats()
    stats.num_rounds, stats.proposed["ngram"], stats.accepted["ngram"] = 2, 8, 4
    engine = fast_engine(speculation=stats, gate=lambda _: asyncio.sleep(0.005))
    async with server_url(engine) as url:
        with Terminal("chat", "--url", url, "--max-tokens", "10", "--temperature", "0") as chat:
            await chat.expect(rf"{MODEL} at {url}/v1\. /help .*\n> ")
            chat.say("hello\n")
            shown = await chat.expect(r"\[10 tokens, .* tokens/s, first after .* s, .*\]\n.*> ")
            assert "\n<user>hell\n" in shown
            assert "50% of drafts accepted, cut at the token limit" in shown
            chat.say("/system Be \x1bkind.\n")
            await chat.expect(r"Set, from the next question on\.\n.*> ")
            chat.say("/params max-tokens 5\n")
            assert "seed         the server decides" in await chat.expect(r"seed .*\n.*> ")
            chat.say("again\n")
            await chat.expect(r"\[5 tokens.*\]\n.*> ")
            assert [each["content"] for each in engine.messages][1:] == ["hello", "<user>hell", "again"]
            assert engine.messages[0]["role"] == "system"
            chat.say("/stats\n")
            await chat.expect(r"all 2: 15 tokens, 50% of drafts accepted\n.*> ")
            chat.say("/sav\n")
            await chat.expect(r"unknown command /sav; did you mean /save\? .*\n.*> ")
            path = tmp_path / "chat.json"
            for outcome in ("Saved 5 messages", "is there already"):
                chat.say(f"/save {path}\n")
                await chat.expect(rf"{outcome}.*\n.*> ")
            chat.say("/clear\n")
            await chat.expect(r"begins anew\.\n.*> ")
            chat.say("/quit\n")
            assert await chat.end() == 0
    assert [each["role"] for each in json.loads(path.read_text())["messages"]] == [
        *("system", "user", "assistant", "user", "assistant")
    ]


async def test_ctrl_c_stops_an_answer_and_ctrl_d_ends() -> None:
    engine = fast_engine(gate=lambda i: asyncio.sleep(0 if i < 3 else 60))
    async with server_url(engine) as url:
        with Terminal("chat", "--url", url, "--temperature", "0") as chat:
            await chat.expect(r"> ")
            chat.say("hello\n")
            await chat.expect(r"<us")
            chat.say("\x03")
            await chat.expect(r"\[3 tokens, .*stopped\]\n.*> ")
            await asyncio.wait_for(engine.streams[0].closed.wait(), 10)
            chat.say("half a li\x03")
            await chat.expect(r"\n.*> ")
            chat.say("\x04")
            assert await chat.end() == 0


EVIL = reply(chunk("\x1b]0;owned\x07 a\u202eb\tc\nd é 👩‍🚀") + chunk("", "stop") + DONE)


class FakeOutput(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("message", [(), ("hello",)])
async def test_an_answer_is_spelled_out_for_a_terminal_and_left_alone_for_a_pipe(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, message: tuple[str, ...]
) -> None:
    """Whatever the question came from: what is steered is where the answer goes."""
    pipe_in(monkeypatch, "hello")
    out = FakeOutput(is_terminal)
    async with scripted_server(EVIL) as script:
        monkeypatch.setattr(sys, "stdout", out)
        assert await command("chat", "--url", script.url, "--model", "m", *message) == 0
    plain = "\x1b]0;owned\x07 a\u202eb\tc\nd é 👩‍🚀\n"
    shown = r"\x1b]0;owned\x07 a\x202eb" + "\tc\nd é 👩‍🚀\n"
    assert out.getvalue().startswith(shown if is_terminal else plain)


async def test_a_terminal_is_safe_from_the_model() -> None:
    async with scripted_server(EVIL) as script:
        with Terminal("chat", "--url", script.url, "--model", "m") as chat:
            await chat.expect(r"> ")
            chat.say("hello\n")
            shown = await chat.expect(r"\[1 token.*\]\n")
            chat.say("/quit\n")
            assert await chat.end() == 0
    assert r"\x1b]0;owned\x07 a\x202eb" in shown
    assert "c\nd é 👩‍🚀\n" in shown


async def test_a_paste_of_several_lines_is_one_question() -> None:
    engine = fast_engine()
    async with server_url(engine) as url:
        with Terminal("chat", "--url", url, "--max-tokens", "3") as chat:
            await chat.expect(r"> ")
            assert "\x1b[?2004h" in chat.raw  # what asks a terminal to mark its pastes
            chat.say("\x1b[200~What does\nthis do:\n  x = 1\x1b[201~\n")
            await chat.expect(r"\[3 tokens.*\]\n")
            chat.say("\x1b[200~/usr/bin\n/usr/lib\x1b[201~\n")  # no command, though it begins like one
            await chat.expect(r"\[3 tokens.*\]\n")
            chat.say("/quit\n")
            assert await chat.end() == 0
    asked = [each["content"] for each in engine.messages if each["role"] == "user"]
    assert asked == ["What does\nthis do:\n  x = 1", "/usr/bin\n/usr/lib"]


async def test_an_answer_is_broken_between_words() -> None:
    words = "Light is scattered by the air, the blue most of all."
    pieces = b"".join(chunk(words[i : i + 3]) for i in range(0, len(words), 3))
    async with scripted_server(reply(pieces + chunk("", "stop") + DONE)) as script:
        with Terminal("chat", "--url", script.url, "--model", "m", width=20) as chat:
            await chat.expect(r"> ")
            chat.say("why\n")
            await chat.expect(r"\[\d+ token")
            chat.say("/quit\n")
            assert await chat.end() == 0
    screen = chat.raw.replace("\r\n", "\n")
    while (cut := re.search(r"\x1b\[(\d+)D\x1b\[K", screen)) is not None:  # what a terminal does about these
        screen = screen[: cut.start() - int(cut[1])] + screen[cut.end() :]
    assert "Light is scattered\nby the air, the\nblue most of all.\n" in screen.replace(" \n", "\n")


async def test_what_is_no_name_of_a_host_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("a..b", "x" * 64 + ".example"):
        assert await command("chat", "--url", f"http://{host}:9", "--model", "m", "hello") == 1
        assert capsys.readouterr().err == f"slipstream: chat: {host}:9 is no name of a host\n"


async def test_without_a_server_one_is_told_how_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("chat", "--url", "http://127.0.0.1:9", "--model", "m", "hello") == 1
    assert capsys.readouterr().err == (
        "slipstream: chat: cannot connect to 127.0.0.1:9: connection refused; start a server with "
        "'slipstream serve', or use 'slipstream run', which needs none\n"
    )


async def test_a_missing_key_is_told_with_the_flag_that_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    async with server_url(fast_engine(), api_key=("secret",)) as url:
        assert await command("chat", "--url", url, "hello") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slipstream: chat: HTTP 401: ")
    assert line.endswith(" Give the key with --api-key-file FILE, or --api-key KEY")
