"""Forced tool calls from a tiny random model over HTTP: always a valid call, whatever its weights say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from config import load_settings
from engine import Engine, build_engine
from tests.e2e.http_server import MODEL, server_url
from tests.support import tool_templates
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_models import save_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PLACE = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/Name"}},
    "required": ["x", "next"],
    "additionalProperties": False,
    "$defs": {"Name": {"enum": ["a", "b\n🦀"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "go", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop-now"}},
]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = save_tiny_model("qwen3", tmp_path_factory.mktemp("tools") / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return directory


@asynccontextmanager
async def client_of(directory: Path, family: str) -> AsyncIterator[openai.AsyncOpenAI]:
    template = directory / f"{family}.jinja"
    template.write_text(tool_templates.ALL[family])
    flags = ["--model", str(directory), "--device", "cpu", "--chat-template", str(template)]
    engine: Engine = build_engine(load_settings([*flags, "--kv-cache-memory", "64MiB"], WITHOUT_KERNELS))
    await engine.start()
    try:
        async with (
            server_url(engine) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client
    finally:
        await engine.stop()


def check(found: Any, *, named: bool) -> None:
    (choice,) = found.choices
    assert choice.finish_reason == ("stop" if named else "tool_calls")
    assert not choice.message.content
    calls = choice.message.tool_calls
    assert 1 <= len(calls) <= (1 if named else 16)
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "go":
            assert set(arguments) == {"x", "next"}
            assert arguments["x"] in (1, 2) and arguments["next"] in ("a", "b\n🦀")
        else:
            assert not named
            assert (call.function.name, arguments) == ("stop-now", {})


async def call_twice(client: openai.AsyncOpenAI, **fields: Any) -> None:
    """Ask for one call whole and in a stream, which must be the same."""
    named = fields["tool_choice"] != "required"

    async def whole() -> Any:
        return await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, **fields)

    async def joined() -> Any:
        async with client.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=TOOLS, **fields
        ) as stream:
            return await stream.get_final_completion()

    replies = await asyncio.gather(whole(), joined())
    for reply in replies:
        check(reply, named=named)
    first, second = (
        [(call.function.name, call.function.arguments) for call in reply.choices[0].message.tool_calls]
        for reply in replies
    )
    assert first == second


@pytest.mark.by_default("hermes", "mistral")
@pytest.mark.parametrize("family", tool_templates.ALL)
async def test_a_forced_choice_is_always_a_valid_call(model_directory: Path, family: str) -> None:
    named = {"type": "function", "function": {"name": "go"}}
    async with client_of(model_directory, family) as client:
        await asyncio.gather(
            call_twice(client, seed=1, tool_choice="required", parallel_tool_calls=False),
            call_twice(client, seed=2, tool_choice=named),
        )


async def test_a_schema_that_cannot_be_followed_is_refused_for_the_tools(model_directory: Path) -> None:
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": impossible}}]
    async with client_of(model_directory, "hermes") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=tools, tool_choice="required"
            )
        assert refused.value.param == "tools"
        free = await client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=tools, max_tokens=5, temperature=0
        )
        assert free.choices[0].finish_reason == "length"
