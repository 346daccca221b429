"""The three APIs for conversations over one real engine and a tiny model: the same prompt, the same reply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.http_server import server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask
from tests.support.messages_grammar import check_message, check_messages_stream
from tests.support.named_events import named_events
from tests.support.responses_grammar import check_response, check_responses_stream
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = "you help " * 12
HELLO = [{"role": "user", "content": "hello there"}]
LINE = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
CONTROL = "x-some-header: cch={};"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    async with real_engine(directory, "--kv-block-size", "4") as engine, server_url(engine) as url:
        yield url


async def test_all_three_say_the_same(real_url: str) -> None:
    common: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    chat = {
        "messages": [{"role": "system", "content": SYSTEM}, *HELLO],
        "max_completion_tokens": 24,
        **common,
    }
    answer = (await ask(real_url, "POST", "/v1/chat/completions", chat)).json()
    text = answer["choices"][0]["message"]["content"]
    body = {"input": HELLO, "instructions": SYSTEM, "max_output_tokens": 24, **common}
    response = check_response((await ask(real_url, "POST", "/v1/responses", body)).json())
    reply = await ask(real_url, "POST", "/v1/responses", {**body, "stream": True})
    streamed = check_responses_stream(named_events(reply.body))
    body = {"messages": HELLO, "system": SYSTEM, "max_tokens": 24, **common}
    message = check_message((await ask(real_url, "POST", "/v1/messages", body)).json())
    reply = await ask(real_url, "POST", "/v1/messages", {**body, "stream": True})
    spoken = check_messages_stream(named_events(reply.body))
    texts = [found["output"][0]["content"][0]["text"] for found in (response, streamed)]
    assert [*texts, *(found["content"][0]["text"] for found in (message, spoken))] == [text] * 4
    num_prompt = answer["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens"] == num_prompt
    counted = await ask(real_url, "POST", "/v1/messages/count_tokens", {"messages": HELLO, "system": SYSTEM})
    assert counted.json() == {"input_tokens": num_prompt}


@pytest.mark.parametrize(("line", "is_found"), [(LINE, True), (CONTROL, False)])
async def test_a_line_that_changes_in_every_request_leaves_the_prefix_in_the_cache(
    real_url: str, line: str, is_found: bool
) -> None:
    async def turn(nonce: str, messages: list[Any]) -> dict[str, Any]:
        head = f"{line.split(':')[0]} {SYSTEM}"  # another one in each case
        system = [{"type": "text", "text": line.format(nonce)}, {"type": "text", "text": head}]
        body = {"messages": messages, "system": system, "max_tokens": 4, "temperature": 0}
        return check_message((await ask(real_url, "POST", "/v1/messages", body)).json())

    first = await turn("eb6c6", HELLO)
    more = [*HELLO, {"role": "assistant", "content": first["content"]}, *HELLO]
    usage = (await turn("0aaa9", more))["usage"]
    num_head = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    assert (usage["cache_read_input_tokens"] > num_head / 2) == is_found, usage
