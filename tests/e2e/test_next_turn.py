"""The next turn of a chat: what it begins with is there, though the template shows replies in other words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config import load_settings
from engine.plan.request import Request
from engine.plan.scheduling.next_turns import NextTurns
from tests.e2e.http_server import MODEL, served
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask
from tests.support.tiny_models import save_tiny_model

PATH = "/v1/chat/completions"
# Earlier replies are shown behind a mark of their own, as a template that drops their thinking shows them.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ '(earlier) ' if m['role'] == 'assistant' else '' }}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FIRST: dict[str, Any] = {"role": "user", "content": "Tell me of ships and the sea, of harbours and of light."}
SECOND: dict[str, Any] = {"role": "user", "content": "And then?"}
BLOCK_SIZE = 4


async def chat(url: str, messages: list[dict[str, Any]]) -> tuple[str, int, int]:
    """The reply, the tokens of the prompt, and those of them that were cached."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    found = (await ask(url, "POST", PATH, body)).json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"], cached


async def second_turn(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> tuple[int, dict[str, int]]:
    """Tokens that the second turn had to compute, and what became of those that were read ahead."""
    model, template = save_tiny_model("llama", directory / "model"), directory / "template.jinja"
    template.write_text(TEMPLATE)
    was_read, slices = asyncio.Event(), []
    next_slice = NextTurns.next_slice

    def cut(turns: NextTurns, arrival_time: float) -> Request | None:
        request = next_slice(turns, arrival_time)
        if request is not None:
            slices.append(request)
        elif slices:  # the last of them has been computed
            was_read.set()
        return request

    monkeypatch.setattr(NextTurns, "next_slice", cut)
    block_size = ("--kv-block-size", str(BLOCK_SIZE))
    async with real_engine(model, "--chat-template", str(template), *block_size) as engine:
        settings = load_settings(["--served-model-name", MODEL, *flags], environ={})
        async with served(settings, engine) as url:
            reply, _, cached = await chat(url, [FIRST])
            assert cached == 0
            if settings.scheduler.read_next_turn:
                await asyncio.wait_for(was_read.wait(), 10)
            messages = [FIRST, {"role": "assistant", "content": reply}, SECOND]
            _, num_tokens, cached = await chat(url, messages)
            return num_tokens - cached, engine.next_turn_tokens()


async def test_the_second_turn_computes_its_new_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_new, ahead = await second_turn(tmp_path, monkeypatch)
    assert num_new < 24, "the text and the marks around it"
    assert ahead["used"] > 20


async def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_new, ahead = await second_turn(tmp_path, monkeypatch, "--no-read-next-turn")
    assert num_new > 50, "the reply is computed anew"
    assert ahead == {"used": 0, "unused": 0}
