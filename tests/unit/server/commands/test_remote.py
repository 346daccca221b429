"""The client side's small parts: where a server is, what events and errors of any server's making say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config import SettingsError
from config.setting import SETTINGS
from server.commands.remote.address import read_address
from server.commands.remote.chunks import Drafts, read_chunk, read_drafts
from server.commands.remote.event_splitter import EventSplitter
from server.commands.remote.failures import BrokenReply, Refused


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        for name in setting.env_names:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "base_url", "netloc"),
    [
        ("http://localhost:9000", "http://localhost:9000/v1", "localhost:9000"),
        ("http://localhost:9000/v1/", "http://localhost:9000/v1", "localhost:9000"),
        ("localhost:9000", "http://localhost:9000/v1", "localhost:9000"),
        ("https://api.example.com/some/v2", "https://api.example.com/some/v2", "api.example.com"),
        ("https://h/v1/chat/completions", "https://h/v1", "h"),
        ("http://[::1]:80", "http://[::1]/v1", "[::1]"),
    ],
)
def test_a_url_may_be_given_in_any_usual_form(url: str, base_url: str, netloc: str) -> None:
    address = read_address(url, None, None)
    assert (address.url, address.netloc) == (base_url, netloc)


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "http://h:99999", "http://h h", "http://u:p@h", "http://h/?k=v"]
)
def test_a_url_that_cannot_be_used_is_one_line(url: str) -> None:
    with pytest.raises(SettingsError, match="flag --url"):
        read_address(url, None, None)


def test_without_a_url_it_is_the_server_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_address(None, None, None).url == "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("SLIPSTREAM_HOST", "0.0.0.0")
    monkeypatch.setenv("SLIPSTREAM_PORT", "9000")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "k1,still-k1")
    address = read_address(None, None, None)
    assert (address.url, address.api_key) == ("http://127.0.0.1:9000/v1", "k1,still-k1")
    assert "k1" not in repr(address)


def test_the_environments_key_goes_to_no_other_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "k1")
    assert read_address("http://127.0.0.1:5", None, None).api_key == "k1"
    assert read_address("http://localhost", None, None).api_key == "k1"
    for url in ("https://example.com", "http://10.0.0.1:8000", "http://localhost.example.com"):
        assert read_address(url, None, None).api_key is None
    path = tmp_path / "key"
    path.write_text("\n  k2 \nk3\n")
    assert read_address("https://example.com", None, path).api_key == "k2"
    assert read_address("https://example.com", "k4", path).api_key == "k4"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_key_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(SettingsError, match="holds no key"):
        read_address(None, None, tmp_path / "key")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_survive_any_cut(size: int, newline: bytes) -> None:
    lines = [
        b"data: {1}",
        b"",
        b": ping",
        b"",
        b"event: x",
        b"data:two",
        b"data: lines",
        b"",
        b"id: 3",
        b"",
        b"",
    ]
    stream = newline.join([*lines, b"data: [DONE]", b"", b""])
    splitter, payloads = EventSplitter(), []
    for start in range(0, len(stream), size):
        payloads += splitter.feed(stream[start : start + size])
    assert payloads == [b"{1}", b"two\nlines", b"[DONE]"]


def test_chunks_of_both_endpoints_are_read() -> None:
    assert read_chunk(b'{"choices":[{"text":"a","finish_reason":"stop"}]}').text == "a"
    chunk = read_chunk(b'{"choices":[{"delta":{"content":"b","reasoning_content":"r"}}],"usage":null}')
    assert (chunk.text, chunk.aside, chunk.usage, chunk.finish_reason) == ("b", "r", None, None)
    tool = {"delta": {"tool_calls": [{"function": {"arguments": "{"}}, {}]}}
    assert read_chunk(json.dumps({"choices": [tool]}).encode()).aside == "{"
    assert read_chunk(b'{"choices":[],"usage":{"completion_tokens":3}}').usage == {"completion_tokens": 3}
    for payload in (
        b"",
        b"[]",
        b'{"choices":[1]}',
        b'{"choices":[{"text":1}]}',
        b'{"error":"no"}',
        b"[" * 10**5,
    ):
        with pytest.raises(BrokenReply):
            read_chunk(payload)


def test_drafts_add_up() -> None:
    metrics = {
        "speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 10, "num_accepted_draft_tokens": 5}
    }
    drafts = read_drafts(metrics)
    assert drafts == Drafts(4, 10, 5)
    total = drafts + Drafts(1, 10, 0)
    assert (total.acceptance_rate, total.tokens_per_step) == (0.25, 2.0)
    assert read_drafts(None) is read_drafts({}) is None
    assert read_drafts({"speculative_decoding": {"num_draft_tokens": "x"}}) == Drafts()
    assert (Drafts().acceptance_rate, Drafts().tokens_per_step) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("status", "headers", "wait_s", "is_retryable"),
    [
        (503, {"retry-after": "3"}, 3.0, True),
        (429, {"retry-after-ms": "250", "retry-after": "1"}, 0.25, True),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None, True),
        (504, {"x-should-retry": "false"}, None, False),
        (400, {}, None, False),
        (400, {"x-should-retry": "true"}, None, True),
        (500, {}, None, True),
    ],
)
def test_what_a_refusal_asks_for(
    status: int, headers: dict[str, str], wait_s: float | None, is_retryable: bool
) -> None:
    refused = Refused(status, headers, b"")
    assert (refused.retry_after_s, refused.is_retryable) == (wait_s, is_retryable)


def test_a_refusal_is_one_readable_line_whatever_the_server_says() -> None:
    body = json.dumps({"error": {"message": "no\x1b[31m\n\nway " + "x" * 999, "code": None, "type": "t"}})
    refused = Refused(400, {}, body.encode())
    assert refused.kind == "400 t"
    assert str(refused).startswith("HTTP 400: no?[31m way xxx") and len(str(refused)) < 330
    assert str(Refused(502, {}, b"<html>\n  bad\n</html>")) == "HTTP 502: <html> bad </html>"
    assert str(Refused(500, {}, b"")) == "HTTP 500: (no message)"
    assert Refused(401, {}, b'{"error":"Unauthorized"}').kind == "401"
