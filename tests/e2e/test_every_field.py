"""Every request field is honoured exactly, with speculation as without it, or refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import pytest_asyncio
import torch
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from config import load_settings
from engine import build_engine
from server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from server.api.openai.protocol_refusals import ON_CHAT, ON_COMPLETIONS
from tests.e2e.http_server import server_url
from tests.e2e.wire import RawReply, ask, events_of
from tests.support.native import WITHOUT_KERNELS
from tests.support.repetitive_world import WORDS, save_repetitive_model, text_of
from tests.support.request_fields import BOTH, CHAT, COMPLETIONS, FIELDS, RequestField, Said
from tests.support.tiny_models import BOS_ID, BOS_TOKEN

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
}
OUR_OWN = {"speculation", "deadline_ms", "return_token_origins"}
VLLM = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens"),
    *("allowed_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "cache_salt"),
    *("priority", "request_id", "structured_outputs", "logits_processors", "logprob_token_ids"),
    *("repetition_detection", "thinking_token_budget", "truncation_side", "use_beam_search", "prompt_embeds"),
}
VLLM_CHAT = {
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("documents", "echo"),
}


def cases(fields: Iterable[RequestField]) -> list[Any]:
    """Each of them in each endpoint's requests."""
    return [pytest.param(row, path, id=f"{row.name}-{path[4:8]}") for row in fields for path in row.paths]


ROWS = cases(FIELDS)


def names(path: str) -> set[str]:
    return {row.name for row in FIELDS if path in row.paths}


async def test_the_table_has_every_field_there_is() -> None:
    for path, kind, refusals, official in (
        (COMPLETIONS, CompletionRequest, ON_COMPLETIONS, openai_completions.CompletionCreateParamsBase),
        (CHAT, ChatCompletionRequest, ON_CHAT, openai_chat.CompletionCreateParamsBase),
    ):
        theirs = set(get_type_hints(official)) | {"stream"} | VLLM
        assert names(path) == set(kind.model_fields) | set(refusals)
        assert names(path) >= theirs | OUR_OWN
        rows = [row.name for row in FIELDS if path in row.paths]
        assert len(rows) == len(set(rows))
    assert names(CHAT) >= VLLM_CHAT


async def test_every_row_of_the_table_says_something() -> None:
    for row in FIELDS:
        assert row.shows or row.why or (row.state == "refused" and row.bad), row.name
        assert row.bad or row.state in ("elsewhere", "ignored"), row.name


# What it may be: every boundary, against an engine that answers anything.


@pytest.mark.by_default
@pytest.mark.parametrize(("row", "path"), ROWS)
async def test_what_is_within_bounds_is_taken(url: str, row: RequestField, path: str) -> None:
    for value in (*row.good, None):
        if value is None and row.name in HELLO[path]:
            continue
        reply = await ask(url, "POST", path, {**HELLO[path], **row.needs, row.name: value})
        assert reply.status in (200, 504), (value, reply.body)  # 504: that deadline cannot be met


@pytest.mark.by_default
@pytest.mark.parametrize(("row", "path"), ROWS)
async def test_what_is_out_of_bounds_is_400_and_named(url: str, row: RequestField, path: str) -> None:
    for value in row.bad:
        reply = await ask(url, "POST", path, {**HELLO[path], **row.needs, row.name: value})
        check_refusal(reply, row.name, value)
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999") if row.is_number else ():
        body = json.dumps({**HELLO[path], **row.needs, row.name: "HERE"}).replace('"HERE"', text)
        reply = await ask(url, "POST", path, body.encode())
        assert reply.status == 400, (text, reply.body)
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("row", "path"), ROWS)
async def test_a_lone_surrogate_is_400_wherever_it_is(url: str, row: RequestField, path: str) -> None:
    body = json.dumps({**HELLO[path], row.name: "HERE"}).replace('"HERE"', '["\\ud800"]')
    assert (await ask(url, "POST", path, body.encode())).status == 400


def check_refusal(reply: RawReply, name: str, value: object) -> None:
    """A 400 that names the field and sends nothing long back."""
    shown = repr(value)[:80]
    assert reply.status == 400, (shown, reply.body)
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error", shown
    assert error["param"].split("[")[0].split(".")[0] == name, (shown, error)
    assert len(reply.body) < 1300


# What it does: a real model, with speculation and without.


@dataclass
class Servers:
    """The same model behind two servers, one of which speculates; and what both have said so far."""

    plain: str
    speculating: str
    replies: dict[str, Any] = field(default_factory=dict)
    num_accepted: int = 0

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The reply of both, which must be equal, but for what tells how it was made."""
        key = path + json.dumps(body, sort_keys=True)
        if key not in self.replies:
            plain, speculating = await self._ask_both(path, body)
            self.replies[key] = normal(plain)
            assert_alike(normal(speculating), self.replies[key])
        return self.replies[key]

    async def ask_together(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        """The same of requests beside each other: which of them found a prompt in the cache is chance."""
        replies = await asyncio.gather(*(self._ask_both(path, body) for body in bodies))
        for plain, speculating in replies:
            assert_alike(without_cached(normal(speculating)), without_cached(normal(plain)))

    async def _ask_both(self, path: str, body: dict[str, Any]) -> tuple[RawReply, RawReply]:
        plain = await ask(self.plain, "POST", path, body)
        speculating = await ask(self.speculating, "POST", path, body)
        if speculating.status == 200 and not body.get("stream"):
            spoken = speculating.json()["metrics"]["speculative_decoding"]
            self.num_accepted += spoken["num_accepted_draft_tokens"]
            assert plain.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        return plain, speculating


def normal(reply: RawReply) -> Any:
    """What of a reply must not depend on speculation, chunking into events, or the clock."""
    label = reply.headers["x-request-id"]
    found: dict[str, Any] = {"status": reply.status, "label": None if label.startswith("req-") else label}
    if reply.headers["content-type"].startswith("text/event-stream"):
        return {**found, **joined(events_of(reply.body))}
    body = reply.json()
    for volatile in ("id", "created", "metrics"):
        body.pop(volatile, None)
    if "error" in body:
        body["error"]["message"] = ""  # may hold times
    return {**found, **body}


def without_cached(found: dict[str, Any]) -> dict[str, Any]:
    """The same, whatever of the prompt was in the cache."""
    (found.get("usage") or {}).pop("prompt_tokens_details", None)
    return found


def assert_alike(one: Any, other: Any) -> None:
    """Equal, but for the last digits of numbers: a pass over drafts sums in another order."""
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for name in other:
            assert_alike(one[name], other[name])
    elif isinstance(other, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-3)
    else:
        assert one == other


def joined(events: list[Any]) -> dict[str, Any]:
    """A stream in one piece, whatever tokens its events held."""
    found: dict[str, Any] = {"stream": True, "text": "", "finish_reason": None}
    for event in events:
        for choice in event["choices"]:
            found["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    found["usage"] = events[-1].get("usage")
    found["usage_everywhere"] = all(event.get("usage") for event in events)
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    """A model that repeats itself, so that drafts are accepted; its tokenizer begins texts with BOS."""
    directory = save_repetitive_model(tmp_path_factory.mktemp("models") / "target")
    add_bos(directory / "tokenizer.json")
    flags = ["--dtype", "float32", "--kv-block-size", "4", "--num-kv-blocks", "256"]
    drafting = [
        "--draft-length-policy",
        "fixed",
        "--min-acceptance-rate",
        "0",
        "--speculation-schedule",
        "sync",
    ]
    urls = []
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            "engine.startup.build.use_compute_threads", lambda: torch.set_num_threads(1)
        )
        for more in (["--speculative-method", "none"], drafting):
            engine = build_engine(load_settings([str(directory), *flags, *more], environ=WITHOUT_KERNELS))
            await engine.start()
            stack.push_async_callback(engine.stop)
            urls.append(await stack.enter_async_context(server_url(engine)))
        yield Servers(urls[0], urls[1])


def add_bos(path: Path) -> None:
    """Have the tokenizer in this file put its first special token before every text."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, BOS_ID)]
    )
    tokenizer.save(str(path))


PHRASE = text_of([*WORDS[:8], *WORDS[2:8], *WORDS[2:8]])
BASIC: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PHRASE, "max_tokens": 20, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": PHRASE}], "max_tokens": 20, "ignore_eos": True},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 7},
    "seeded": {"temperature": 0.8, "seed": 11},
}


async def said(servers: Servers, path: str, mode: str) -> Said:
    """What the model says to the basics."""
    reply = await servers.ask(path, {**BASIC[path], **MODES[mode], "return_token_ids": True})
    choice = reply["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return Said(text, choice["token_ids"])


@pytest.mark.by_default
@pytest.mark.parametrize(("row", "path"), cases(row for row in FIELDS if row.is_good_anywhere))
async def test_speculation_changes_nothing_whatever_its_value(
    servers: Servers, row: RequestField, path: str
) -> None:
    short = {**BASIC[path], **MODES["seeded"], "max_tokens": 8, **row.needs}
    await servers.ask_together(path, [{**short, row.name: value} for value in row.good])


@pytest.mark.by_default
@pytest.mark.parametrize(
    ("row", "path", "mode"),
    [
        pytest.param(row, path, mode, id=f"{row.name}-{path[4:8]}-{mode}")
        for row in FIELDS
        for path in row.paths
        for mode in row.modes
        if row.shows
    ],
)
async def test_it_shows_and_speculation_changes_nothing(
    servers: Servers, row: RequestField, path: str, mode: str
) -> None:
    basics = {**BASIC[path], **MODES[mode]}
    words = await said(servers, path, mode)
    beside = {**basics, **row.beside(words)}
    assert row.shows is not None
    shown = {**beside, **row.shows(words)}
    if row.name == "cache_salt":
        servers.replies.pop(path + json.dumps(beside, sort_keys=True), None)  # now it is in the cache
    assert await servers.ask(path, shown) != await servers.ask(path, beside), shown


async def test_drafts_are_accepted_meanwhile(servers: Servers) -> None:
    """Asks long enough for it: whether other tests of the module ran before in this process is chance."""
    before = servers.num_accepted
    for path in BOTH:
        await servers.ask(path, {**BASIC[path], **MODES["greedy"], "max_tokens": 100})
    assert servers.num_accepted - before > 5
