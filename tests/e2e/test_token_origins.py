"""`return_token_origins`: which tokens of a reply were drafted, over a real socket, whole and streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import pytest_asyncio

from engine import SpecStats
from tests.e2e.http_server import server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine
from tests.support.repetitive_world import WORDS, save_repetitive_model, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PHRASE = text_of([*WORDS[:8], *WORDS[2:8], *WORDS[2:8]])
BASICS: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PHRASE, "logprobs": 1, **BASICS},
    CHAT: {"messages": [{"role": "user", "content": PHRASE}], "logprobs": True, **BASICS},
}
WHOLE: dict[str, Any] = {}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
MODES = [pytest.param(path, how, id=f"{path[4:8]}-{len(how)}") for path in BODIES for how in (WHOLE, STREAM)]
ASKED = {"return_token_origins": True, "return_token_ids": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A model that repeats itself, so that drafts are accepted."""
    directory = save_repetitive_model(tmp_path_factory.mktemp("models") / "target")
    flags = ("--speculation-schedule", "sync", "--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
    async with real_engine(directory, *flags) as engine, server_url(engine) as url:
        yield url


@dataclass
class Told:
    """What a reply says of one choice: its text, and the lists with an entry a token."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def add(self, entry: dict[str, Any]) -> None:
        """A whole choice, or one chunk of it, whose lists are as long as each other."""
        message = entry.get("message") or entry.get("delta") or {}
        self.text += entry.get("text") or message.get("content") or ""
        assert len(entry["token_origins"]) == len(entry["token_ids"])
        scores = entry["logprobs"]
        assert len(scores.get("content", scores.get("tokens"))) == len(entry["token_ids"])
        self.ids += entry["token_ids"]
        self.origins += entry["token_origins"]


async def entries_of(url: str, path: str, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All choices, or chunks of them, and the reply's metrics of speculation."""
    reply = await ask(url, "POST", path, {**BODIES[path], **fields})
    assert reply.status == 200, reply.body
    objects = events_of(reply.body) if fields.get("stream") else [reply.json()]
    return list(chain.from_iterable(each["choices"] for each in objects)), objects[-1]["metrics"][
        "speculative_decoding"
    ]


async def told(url: str, path: str, **fields: Any) -> tuple[list[Told], dict[str, Any]]:
    """The choices in order, of entries that carry tokens."""
    entries, metrics = await entries_of(url, path, **ASKED, **fields)
    choices: dict[int, Told] = {}
    for entry in entries:
        if "token_origins" in entry:
            choices.setdefault(entry["index"], Told()).add(entry)
    return [choices[index] for index in sorted(choices)], metrics


def runs_of(origins: Iterable[str]) -> Counter[int]:
    """How many runs of so many drafts there are; in a step they come before a token of the target."""
    words = "".join(" " if each == "target" else "d" for each in origins).split(" ")
    return Counter(map(len, filter(None, words)))


@pytest.mark.by_default
@pytest.mark.parametrize(("path", "how"), MODES)
async def test_the_drafts_are_those_that_verification_accepted(
    url: str, path: str, how: dict[str, Any]
) -> None:
    (choice,), metrics = await told(url, path, **how)
    assert len(choice.origins) == 60
    assert set(choice.origins) == {"draft", "target"}
    assert choice.origins.count("draft") == metrics["num_accepted_draft_tokens"] > 3
    rounds = Counter(dict(enumerate(metrics["acceptance_histogram"])))
    del rounds[0]
    assert runs_of(choice.origins) == +rounds


@pytest.mark.by_default
@pytest.mark.parametrize(("path", "how"), MODES)
async def test_asking_changes_nothing_else(url: str, path: str, how: dict[str, Any]) -> None:
    (asked,), _ = await told(url, path, **how)
    entries, _ = await entries_of(url, path, return_token_ids=True, **how)
    assert not [entry for entry in entries if "token_origins" in entry]
    assert [token for entry in entries for token in entry.get("token_ids", [])] == asked.ids
    (plain,), _ = await told(url, path, speculation={"enabled": False}, **how)
    assert (plain.text, plain.ids) == (asked.text, asked.ids)
    assert plain.origins == ["target"] * 60
    alone, _ = await entries_of(url, path, return_token_origins=True, **how)
    assert sum(len(entry.get("token_origins", [])) for entry in alone) == 60
    assert not [entry for entry in alone if "token_ids" in entry]


@pytest.mark.by_default
@pytest.mark.parametrize(("path", "how"), MODES)
async def test_each_choice_tells_its_own(url: str, path: str, how: dict[str, Any]) -> None:
    choices, metrics = await told(url, path, n=3, **how)
    assert [len(choice.origins) for choice in choices] == [60] * 3
    drafts = sum(choice.origins.count("draft") for choice in choices)
    assert drafts == metrics["num_accepted_draft_tokens"] > 10


@pytest.mark.by_default
@pytest.mark.parametrize(("path", "how"), MODES)
async def test_what_a_stop_string_cuts_off_is_not_told(url: str, path: str, how: dict[str, Any]) -> None:
    (whole,), _ = await told(url, path)
    for cut in range(8, 24, 3):
        (choice,), metrics = await told(url, path, stop=whole.text[cut : cut + 3], **how)
        assert choice.ids == whole.ids[: len(choice.ids)]
        accepted = metrics["num_accepted_draft_tokens"]  # those of the last step that were cut off, too
        assert accepted - 4 <= choice.origins.count("draft") <= accepted


@pytest.mark.parametrize("merge", [1, 4, 7, 60])
async def test_the_parts_of_a_message_tell_each_token_once(merge: int) -> None:
    """A delta may show the end of the reasoning and the beginning of the answer: two chunks of one step."""
    reply = "<think>\nLet me see.\n</think>\n\nIt rains."
    stats = SpecStats()
    stats.observe_round("ngram", 40, 20, 21)
    engine = FakeEngine(reasoning="qwen3", reply=reply, max_model_len=4096, merge=merge, speculation=stats)
    async with server_url(engine) as url:
        (choice,), _ = await told(url, CHAT, **STREAM)
        (whole,), _ = await told(url, CHAT)
    assert len(choice.origins) == len(reply)
    assert choice.origins == whole.origins
    assert (choice.origins.count("draft") > 0) is (merge > 1)


async def test_it_is_a_switch() -> None:
    async with server_url(FakeEngine()) as url:
        for path, body in BODIES.items():
            reply = await ask(url, "POST", path, {**body, "return_token_origins": "yes"})
            assert (reply.status, reply.json()["error"]["param"]) == (400, "return_token_origins")
