"""Small shapes: errors, log-probabilities, events, keys."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from config import ServerSettings
from engine import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    StartRefused,
    TokenLogprobs,
)
from engine.plan.metrics.tenant_shares import ANONYMOUS, OTHERS
from server.api.openai.logprobs import (
    TEXT_START,
    TextPlace,
    TokenSpelling,
    chat_logprobs,
    completion_logprobs,
    place_behind,
)
from server.http.auth import KeyRing, read_keys
from server.http.errors import error_reply, invalid, shown
from server.http.key_file import RESERVED, ApiKey
from server.http.sse import encode_event
from server.observability.http_metrics import HttpMetrics


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (invalid("no", "x"), 400, "invalid_request_error", None),
        (InvalidRequest("no", "x"), 400, "invalid_request_error", None),
        (
            ContextLengthExceeded(limit=8, prompt_tokens=9, max_tokens=1, param="prompt"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (Overloaded("wait", code="queue_timeout"), 503, "overloaded_error", "queue_timeout"),
        (EngineDead("dead"), 503, "server_error", "engine_dead"),
        (RequestFailed("broken", "sampler"), 500, "server_error", "sampler_failed"),
        (HTTPException(418), 418, "invalid_request_error", None),
        (HTTPException(502), 502, "server_error", None),
    ],
)
def test_each_error_has_its_reply(error: Exception, status: int, kind: str, code: str | None) -> None:
    reply = error_reply(error)
    assert (reply.status, reply.type, reply.code) == (status, kind, code)


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    reply = error_reply(KeyError("/secret/path"))
    assert reply.status == 500
    assert "secret" not in json.dumps(reply.body())
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


def test_text_that_is_sent_back_is_short() -> None:
    assert shown("x" * 100) == "x" * 100
    assert len(shown("x" * 101)) == 100


def test_a_token_that_cannot_be_drawn_is_still_json() -> None:
    logprobs = [TokenLogprobs(65, -math.inf, 3, ((66, -0.5), (66, -1.0), (65, -math.inf)))]
    spelling = TokenSpelling(chr, lambda token_id: None)
    shapes = completion_logprobs(logprobs, spelling, TextPlace(10)), chat_logprobs(logprobs, spelling)
    for shape in shapes:
        encode_event(shape)
    assert shapes[0]["token_logprobs"] == [-9999.0]
    assert shapes[0]["top_logprobs"] == [{"B": -0.5, "A": -9999.0}]
    assert shapes[0]["text_offset"] == [10]


def test_tokens_stand_where_their_characters_do_in_the_text() -> None:
    """A character that several tokens share is one of the text, however the deltas cut it."""
    text = "é🦀 你"
    spelling = TokenSpelling(
        lambda byte: bytes([byte]).decode("utf-8", "replace"), lambda byte: bytes([byte])
    )
    logprobs = [TokenLogprobs(byte, -0.5, 1, ()) for byte in text.encode()]
    expected = [text.index(char) for char in text for _ in char.encode()]
    for size in (1, 2, len(logprobs)):
        place = TEXT_START
        found: list[object] = []
        for start in range(0, len(logprobs), size):
            part = logprobs[start : start + size]
            found += completion_logprobs(part, spelling, place)["text_offset"]
            place = place_behind((each.token_id for each in part), spelling, place)
        assert found == expected
        assert place == TextPlace(len(text))


def test_an_event_is_one_line_of_ascii() -> None:
    assert encode_event({"text": "a\n\u2028é\ud800"}) == b'data: {"text":"a\\n\\u2028\\u00e9\\ud800"}\n\n'
    with pytest.raises(ValueError, match="Out of range"):
        encode_event({"x": math.nan})


def test_keys_are_compared_in_constant_time_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, sent: bytes) -> bool:
        compared.append((known, sent))
        return known == sent

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = KeyRing(map(ApiKey, ("one", "two", "two")), b"secret")
    one, two = (ring.tenant_of([(b"authorization", b"Bearer " + key)]) for key in (b"one", b"two"))
    assert None not in (one, two)
    assert one != two
    assert [len(side) for pair in compared for side in pair] == [32] * 8  # every key, found or not
    for sent in (b"Bearer on", b"Bearer onee", b"Bearer \xff\xfe", b"bearer", b"Bearer  "):
        assert ring.tenant_of([(b"authorization", sent)]) is None
    assert ring.tenant_of([]) is None
    assert not KeyRing([], b"")


def test_key_files_hold_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# those of the shop\nb\n\n  c  \n  # d\nshop = e=\n")
    settings = ServerSettings(api_key=("a",), api_key_file=file)
    assert read_keys(settings) == (ApiKey("a"), ApiKey("b"), ApiKey("c"), ApiKey("e=", "shop"))
    file.write_bytes(b"\xef\xbb\xbfb#c\r\n")
    assert read_keys(settings) == (ApiKey("a"), ApiKey("b#c"))
    file.write_text("\n")
    with pytest.raises(StartRefused, match="holds no key"):
        read_keys(settings)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartRefused, match="cannot be read"):
        read_keys(settings)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("two words", "line 2 is neither KEY nor NAME = KEY"),
        ("b # a comment", "line 2 is neither"),
        ("shop=a b", "line 2 is neither"),
        ("a shop = b", "line 2 is neither"),
        ("sh/op = b", "line 2 is neither"),
        ("clé", "line 2 is neither"),
        (f"{'n' * 65} = b", "line 2 is neither"),
        ("anonymous = b", "line 2: the name 'anonymous' is taken"),
        ("other = b", "line 2: the name 'other' is taken"),
    ],
)
def test_a_line_that_is_no_key_is_refused_and_not_shown(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a\n{line}\n", encoding="utf-8")
    with pytest.raises(StartRefused) as caught:
        read_keys(ServerSettings(api_key_file=file))
    assert why in str(caught.value)
    assert line not in str(caught.value)


def test_the_names_that_metrics_use_are_nobodys() -> None:
    assert set(RESERVED) == {ANONYMOUS, OTHERS}


def test_a_tenant_is_its_keys_name_or_a_digest_under_the_secret() -> None:
    keys = [ApiKey("one"), ApiKey("two"), ApiKey("two", "shop"), ApiKey("new", "shop")]
    ring, other = KeyRing(keys, b"secret"), KeyRing(keys, b"another")

    def tenant(ring: KeyRing, key: str) -> str | None:
        return ring.tenant_of([(b"authorization", f"Bearer {key}".encode())])

    assert [tenant(ring, key) for key in ("two", "new", "wrong")] == ["shop", "shop", None]
    shown = tenant(ring, "one")
    assert shown is not None and len(shown) == 16 and shown != tenant(other, "one")
    # What a stranger could make of a guess without knowing the secret.
    assert shown not in {hashlib.new(name, b"one").hexdigest()[:16] for name in ("sha256", "blake2b", "md5")}


def test_unknown_names_are_logged_once_and_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "slipstream.server")
    http = HttpMetrics()
    for _ in range(3):
        http.count_ignored(1, ["colour"])
    http.count_ignored(500, [f"name-{i}" for i in range(500)])
    assert http.ignored_parameters == 503
    assert len(caplog.records) == 100
