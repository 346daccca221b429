"""What clients could ask for that other servers have fallen over or given away; ours answers as it should."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from packaging.requirements import Requirement
from packaging.version import Version

from config.schema import CacheSettings
from server.app import build_app
from tests.e2e.http_server import make_settings, served, server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fake_engine import FakeEngine
from tests.support.fakes import expected_output
from tests.support.tiny_models import save_tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROOT = Path(__file__).parents[2]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A server with all its parts, which no test here may harm."""
    model = save_tiny_model("llama", tmp_path_factory.mktemp("clients") / "llama")
    async with real_engine(model) as engine, server_url(engine) as url:
        yield url
        assert (await ask(url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})).status == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], None, ["a", ""], [[1], []], [None], ["", "a", ""], [[], [1]], {}, [[[1]]]]
)
async def test_a_prompt_of_nothing_is_refused_alone_and_among_others(url: str, prompt: object) -> None:
    reply = await ask(url, "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "prompt")


# What an error must not tell: an address, a file of ours, a class or a line of code.
GIVEN_AWAY = re.compile(rb"0x[0-9a-f]{4}|\.py\b|Traceback|<class |object at 0|-packages")
FIELDS: tuple[tuple[str, object], ...] = (
    ("prompt", [99999999]),
    ("max_tokens", "x"),
    ("temperature", {}),
    ("stop", 5),
    ("logit_bias", {"x": 1}),
    ("n", -1),
    ("logprobs", 10**6),
    ("stream_options", 5),
    ("speculation", {"method": "x"}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"grammar": "start: x"}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": {"$ref": "#/nope"}}),
    ("prompt_embeds", "x"),
    ("suffix", "x"),
    ("chat_template", "{{ self }}"),
    ("chat_template_kwargs", {"tools": "x"}),
    ("tools", [{"type": "function", "function": {}}]),
)
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
MESSAGES: tuple[object, ...] = (
    [],
    [{}],
    "x",
    [{"role": "user"}],
    [{"role": "user", "content": [IMAGE]}],
    [{"role": "tool", "content": "x", "tool_call_id": 5}],
    [{"role": "assistant", "tool_calls": [{}]}],
)
TALK = [{"role": "user", "content": "x"}]
WRONG: tuple[tuple[str, Any], ...] = (
    *((COMPLETIONS, {"prompt": "a", name: value}) for name, value in FIELDS[:-3]),
    *((CHAT, {"messages": TALK, name: value}) for name, value in FIELDS[-3:]),
    *((CHAT, {"messages": messages}) for messages in MESSAGES),
    (COMPLETIONS, {"prompt": "a", "model": "../../etc/passwd"}),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"\xff"),
    (COMPLETIONS, b"[" * 1000),
    ("/nope", {}),
    ("/detokenize", {"tokens": [2**31]}),
    ("/tokenize", {"prompt": ["a"]}),
    ("/v1/requests/x/cancel", {}),
    ("/v1/models", {}),
)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(len(WRONG)))
async def test_an_error_gives_nothing_of_the_inside_away(url: str, number: int) -> None:
    path, body = WRONG[number]
    reply = await ask(url, "POST", path, body)
    assert 400 <= reply.status < 500, reply.body
    assert not GIVEN_AWAY.search(reply.body), reply.body
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


# Words of endpoints that load, write or run something, by which other servers were taken over.
NOT_HERE = (
    "upload",
    "pull",
    "push",
    "lora",
    "adapter",
    "sleep",
    "rpc",
    "invocations",
    "pause",
    "exec",
)


def test_there_is_no_route_that_takes_models_or_other_forms_than_uploads() -> None:
    app = build_app(make_settings(), cast(Any, FakeEngine()))
    assert "Mount" not in {type(route).__name__ for route in app.routes}, "no directory is served"
    paths = set(app.openapi()["paths"])
    assert len(paths) > 10
    assert not [path for path in paths for word in NOT_HERE if word in path]
    assert {path for path in paths if "file" in path} == {
        "/v1/files",  # of requests, by ids of the server's own
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
    }
    bodies = [
        operation["requestBody"]["content"]
        for path in app.openapi()["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    forms = [content for content in bodies if set(content) != {"application/json"}]
    assert len(bodies) > 10 and list(map(set, forms)) == [{"multipart/form-data"}], (
        "files are uploaded at one path"
    )


def test_no_route_has_its_form_parsed_for_it() -> None:
    """Uploads are read piece by piece to disk: what the framework makes of a form is held in memory."""
    assert "orjson" not in requirements()
    sources = [path.read_text("utf-8") for path in (ROOT / "server").rglob("*.py")]
    assert not [text for text in sources if "UploadFile" in text or ".form(" in text or "Form(" in text]


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("python-multipart", "0.0.34"),
        ("torch", "2.10"),
        ("transformers", "5.3"),
        ("jinja2", "3.1.6"),
        ("safetensors", "0.6"),
    ],
)
def test_versions_with_known_holes_are_not_taken(package: str, version: str) -> None:
    oldest = min(Version(each.version) for each in requirements()[package].specifier if each.operator == ">=")
    assert oldest >= Version(version)


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {each.name: each for each in map(Requirement, project["dependencies"])}


async def test_keys_that_are_no_ascii_are_wrong_and_no_fault() -> None:
    async with server_url(FakeEngine(), api_key=("key",)) as url:
        for sent in ("Bearer \xff\xfe", "Bearer schl\xfcssel", "Bearer \x80", "Bearer " + "k" * 10_000):
            reply = await ask(url, "GET", "/v1/models", None, {"authorization": sent})
            assert reply.status == 401


SECRET = list(range(40))
FIRST, SECOND = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}


async def test_nobody_learns_from_the_cache_what_was_asked_under_another_salt() -> None:
    """Neither by the count of cached tokens nor by finding them, whoever asks."""
    body = {"prompt": SECRET, "max_tokens": 2, "temperature": 0}
    shape = EngineShape(prefix_caching=True)
    async with running_engine(shape) as harness, server_url(harness.engine, api_key=("one", "two")) as url:

        async def cached(headers: dict[str, str], **fields: Any) -> int:
            usage = (await ask(url, "POST", COMPLETIONS, {**body, **fields}, headers)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await cached(FIRST, cache_salt="A") == 0
        assert await cached(FIRST, cache_salt="A") > 0
        assert await cached(FIRST) == 0
        for salt in ("B", "a", "A ", "+A", "AA", "None"):
            assert await cached(SECOND, cache_salt=salt) == 0


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_tenant_finds_only_its_own_prefixes_unless_they_are_shared(is_shared: bool) -> None:
    """Without any salt, and with the same one; nor does a tenant flush what another has cached."""
    settings = make_settings(api_key=("one", "two")).model_copy(
        update={"cache": CacheSettings(share_prefix_cache=is_shared)}
    )
    shape = EngineShape(prefix_caching=True)
    async with running_engine(shape) as harness, served(settings, harness.engine) as url:

        async def cached(headers: dict[str, str], **fields: Any) -> bool:
            body = {"prompt": SECRET, "max_tokens": 2, "temperature": 0, **fields}
            usage = (await ask(url, "POST", COMPLETIONS, body, headers)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"]) > 0

        async def reset(headers: dict[str, str]) -> bool:
            return bool(
                (await ask(url, "POST", "/reset_prefix_cache", None, headers)).json()["num_freed_blocks"]
            )

        for salt in ({}, {"cache_salt": "A"}):
            assert not await cached(FIRST, **salt)
            assert await cached(FIRST, **salt)
            assert await cached(SECOND, **salt) is is_shared
        assert await reset(SECOND)
        assert await cached(FIRST) is not is_shared
        assert await cached(FIRST, cache_salt="A") is not is_shared
        assert not await cached(SECOND) or is_shared
        assert await reset(FIRST)
        assert not await cached(FIRST)


async def test_two_tenants_with_the_same_prefix_get_what_each_gets_alone() -> None:
    """Drafts follow the request, whoever else has begun in the same words."""
    prompts = [[*SECRET[:20], tail] for tail in range(6)]
    drafters = [FakeDrafter(alpha=0.7), FakeDrafter(method="ngram", alpha=0.5, is_cheap=True)]
    shape = EngineShape(prefix_caching=True)
    async with (
        running_engine(shape, drafters=drafters) as harness,
        server_url(harness.engine, api_key=("one", "two")) as url,
    ):
        replies = await asyncio.gather(
            *(
                ask(
                    url,
                    "POST",
                    COMPLETIONS,
                    {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True},
                    headers,
                )
                for prompt in prompts
                for headers in (FIRST, SECOND)
            )
        )
    for number, reply in enumerate(replies):
        expected = expected_output(prompts[number // 2], 20)
        assert reply.json()["choices"][0]["token_ids"] == expected
