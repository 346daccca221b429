"""What the log never holds, at any level: text of prompts and replies, keys, lines of a client's making."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from config import load_settings
from engine import build_engine
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from server.commands import cli
from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask
from tests.support import tool_templates
from tests.support.captured_log import CapturedLog, captured_log
from tests.support.engines import running_engine
from tests.support.fake_engine import FakeEngine
from tests.support.native import WITHOUT_KERNELS
from tests.support.speculated import single_threaded
from tests.support.tiny_models import save_tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MARK = "xyzzyplugh"
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {MARK: {"const": MARK}}, "required": [MARK], "title": MARK}
TOOL = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": MARK, "description": MARK, "schema": SCHEMA}}

# Fields that nobody knows are left out: their names are logged once, on purpose.
BODIES: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": MARK, "max_tokens": 5, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": MARK, "max_tokens": 5, "stop": [MARK], "bad_words": [MARK], "stream": True}),
    (COMPLETIONS, {"prompt": MARK, "user": MARK, "metadata": {MARK: MARK}, "cache_salt": MARK}),
    (COMPLETIONS, {"prompt": MARK, "prediction": {"type": "content", "content": MARK}, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": MARK * 500}),
    (COMPLETIONS, {"prompt": MARK, "suffix": MARK}),
    (COMPLETIONS, {"prompt": {MARK: MARK}}),
    (COMPLETIONS, {"prompt": MARK, "max_tokens": MARK}),
    (COMPLETIONS, {"prompt": MARK, "logit_bias": {MARK: 1}}),
    (COMPLETIONS, {"prompt": MARK, "model": MARK}),
    (COMPLETIONS, {"prompt": MARK, "service_tier": MARK}),
    (COMPLETIONS, {"prompt": MARK, "structured_outputs": {"choice": [MARK]}, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": MARK, "structured_outputs": {"regex": MARK + "("}}),
    (COMPLETIONS, {"prompt": MARK, "structured_outputs": {"grammar": MARK}}),
    (COMPLETIONS, f'{{"prompt": "{MARK}'.encode()),
    (COMPLETIONS, f'["{MARK}"]'.encode()),
    (CHAT, {"messages": [{"role": "user", "content": MARK, "name": MARK}], "max_tokens": 5}),
    (CHAT, {"messages": [{"role": MARK, "content": MARK}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]}),
    (CHAT, {"messages": HELLO, "response_format": FORM, "max_tokens": 40}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {MARK: MARK}}}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 20}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "stream": True, "max_tokens": 20}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": MARK}}),
    ("/tokenize", {"prompt": MARK}),
    ("/tokenize", {"prompt": 7, "model": MARK}),
    (f"/v1/{MARK}", {"prompt": MARK}),
    (f"/v1/requests/{MARK}/cancel", None),
    (f"{COMPLETIONS}?key={MARK}", {"prompt": MARK, "max_tokens": 1}),
]
HEADERS = {"user-agent": MARK, "cookie": MARK, "x-forwarded-for": MARK, "traceparent": MARK, MARK: MARK}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[CapturedLog]:
    with captured_log(request.param, "debug") as log:
        yield log


async def ask_everything(url: str, log: CapturedLog) -> None:
    for path, body in BODIES:
        reply = await ask(url, "POST", path, body, HEADERS)
        assert reply.status < 500, (path, body)
    # The last lines come a moment after their replies.
    async with asyncio.timeout(10):
        while log.text.count(" request" if log.text[0] != "{" else '"request"') < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("family", ["hermes", "llama"])
async def test_no_text_of_a_prompt_or_a_reply_is_logged(log: CapturedLog, family: str) -> None:
    """The fake engine repeats the prompt, so its replies hold the mark as well."""
    engine = FakeEngine(tool_template=tool_templates.ALL[family], max_model_len=4096)
    async with server_url(engine) as url:
        reply = await ask(url, "POST", COMPLETIONS, {"prompt": MARK, "max_tokens": 10, "temperature": 0})
        assert reply.json()["choices"][0]["text"] == MARK
        await ask_everything(url, log)
    assert len(log.lines) >= len(BODIES)
    assert MARK not in log.text


async def test_nor_by_an_engine_with_a_model(log: CapturedLog, directory: Path) -> None:
    flags = [str(directory), "--dtype", "float32", "--kv-cache-memory", "16MiB"]
    with single_threaded():
        engine = build_engine(load_settings(flags, environ=WITHOUT_KERNELS))
        await engine.start()
        try:
            async with server_url(engine) as url:
                await ask_everything(url, log)
        finally:
            await engine.stop()
    assert len(log.lines) >= len(BODIES)
    assert MARK not in log.text


class Clumsy(FakeEngine):
    """Says what it was given when something breaks, as libraries do."""

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, tenant: str | None = None
    ) -> list[int]:
        try:
            return [int(text)]
        except ValueError as error:
            raise KeyError(f"cannot encode {text}") from error


async def test_a_fault_is_logged_with_its_frames_and_without_its_words(log: CapturedLog) -> None:
    async with server_url(Clumsy()) as url:
        reply = await ask(url, "POST", COMPLETIONS, {"prompt": MARK})
        assert reply.status == 500
        assert MARK not in reply.body.decode()
    assert "unexpected KeyError in a request" in log.text
    assert "in encode" in log.text
    assert MARK not in log.text


async def test_nor_does_an_engine_whose_text_fails(log: CapturedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def choke(*_: object, **__: object) -> None:
        raise ValueError(f"cannot read or write {MARK}")

    monkeypatch.setattr(Tokenizer, "encode", choke)
    monkeypatch.setattr(Detokenizer, "push", choke)
    monkeypatch.setattr(Detokenizer, "decode", choke)
    async with running_engine() as harness, server_url(harness.engine) as url:
        for prompt in (MARK, [5, 6, 7]):
            for stop in ([], [MARK]):
                body = {"prompt": prompt, "max_tokens": 5, "stop": stop}
                reply = await ask(url, "POST", COMPLETIONS, body)
                assert reply.status == 500
                assert MARK not in reply.body.decode()
    assert log.text.count("in choke") == 4
    assert log.text.count("ValueError") >= 4
    assert MARK not in log.text


async def test_a_fault_behind_the_first_byte_says_no_more(log: CapturedLog) -> None:
    async def gate(i: int) -> None:
        if i == 2:
            raise ValueError(MARK)

    async with server_url(FakeEngine(gate=gate)) as url:
        reply = await ask(url, "POST", COMPLETIONS, {"prompt": "abcd", "stream": True, "max_tokens": 4})
        assert MARK not in reply.body.decode()
    assert "unexpected ValueError in a request" in log.text
    assert MARK not in log.text


async def test_keys_are_shown_nowhere(log: CapturedLog, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    async with server_url(FakeEngine(), api_key=(MARK,)) as url:
        for key in (MARK, f"wrong-{MARK}"):
            header = {"authorization": f"Bearer {key}"}
            for path in ("/server_info", "/openapi.json", "/version", "/load", "/metrics", "/docs", "/"):
                shown.append((await ask(url, "GET", path, None, header)).body.decode())
            for body in ({"prompt": "a", "max_tokens": 2}, {"prompt": 7}, {"prompt": "a", "model": "x"}):
                shown.append((await ask(url, "POST", COMPLETIONS, body, header)).body.decode())
    assert cli.main(["config", "show", "--origins", "--api-key", MARK]) == 0
    assert cli.main(["config", "show", "--api-key", MARK, "--port", "x"]) == 2
    assert cli.main(["serve", "--api-key", MARK, "--no-such-flag"]) == 2
    shown += capsys.readouterr()
    assert all(MARK not in text for text in (*shown, log.text))
    assert "tenant" in log.text


# Lines of somebody else's making.

FORGED = "2026-01-01T00:00:00Z info forged"
TAILS = [
    "\x1b[2J",
    "\r",
    "%0a" + FORGED,
    "%0d%0a" + FORGED,
    "\x00",
    "\x7f",
    "\u2028",
    "\u202e",
    "\u0085",
    '"',
    "\\",
]


def hostile(tail: str) -> list[tuple[str, str, Any, dict[str, str]]]:
    """Requests that carry `tail` wherever a client can write."""
    raw = tail.encode().decode("latin-1")  # as it goes over the wire
    plain = "".join(char for char in raw if char not in "\x00\r\n")  # what a parser lets into a header
    body = {"prompt": tail, "user": tail, "max_tokens": 1}
    inside = "\n" + tail + FORGED
    return [
        ("POST", COMPLETIONS, {**body, "model": "test-model" + inside}, {}),
        ("POST", COMPLETIONS, {**body, "request_id": "id" + inside}, {}),
        ("POST", COMPLETIONS, {**body, "stop": [inside], "cache_salt": inside}, {}),
        ("POST", COMPLETIONS, {**body, inside: 1}, {}),
        ("POST", COMPLETIONS, body, {"x-request-id": "id" + plain}),
        ("POST", COMPLETIONS, body, {"user-agent": plain, "x-other": plain, "traceparent": plain}),
        ("POST", COMPLETIONS, body, {"authorization": "Bearer " + plain}),
        ("GET", "/v1/models/" + plain.replace(" ", "%20"), None, {}),
        ("GET", "/nowhere" + plain.replace(" ", "%20"), None, {}),
        ("POST", f"/v1/requests/{plain.replace(' ', '%20')}/cancel", None, {}),
    ]


async def send(url: str, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
    """Whatever becomes of it: some of these are no HTTP."""
    wire = await Wire.connect(url)
    try:
        async with asyncio.timeout(10):
            await wire.send(method, path, b"" if body is None else json.dumps(body).encode(), headers)
            await wire.head()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        await wire.close()


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_client_can_write_a_line(log_format: Literal["text", "json"]) -> None:
    num_sent = 0
    with captured_log(log_format, "debug") as log:
        async with server_url(FakeEngine()) as url:
            for tail in TAILS:
                for method, path, body, headers in hostile(tail):
                    await send(url, method, path, body, headers)
                    num_sent += 1
            await send(url, "GET", "/v1/models", None, {"x-request-id": "the last one"})
            async with asyncio.timeout(10):
                while "the last one" not in log.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        assert num_sent / 2 < len(log.lines)
        assert all(line.isprintable() for line in log.lines)
        if log_format == "json":
            assert all(line.isascii() and json.loads(line)["event"] for line in log.lines)
        else:
            # Every line begins with the time at which it was logged, and none with a time of a client's.
            assert all(line.startswith("20") and not line.startswith(FORGED[:20]) for line in log.lines)
