"""The second turn of a long chat: its first token should wait for the new text only."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from tempfile import NamedTemporaryFile
from typing import Any

from tests.bench.context import BenchContext
from tests.bench.processes import Server
from tests.bench.report import Bar, Section
from tests.bench.workloads import Prompt, prompts_of

CHAT_TOKENS = 3000  # of the first message
SHORT_TOKENS = 200  # of the prompt that the second turn is held to
REPLY_TOKENS = 100
PAIRS = 5  # a run
PAUSE_S = 1.0  # between a reply and the next turn: nobody reads and writes faster
BAR = 1.3
CASES: dict[str, tuple[str, ...]] = {"read ahead": (), "--no-read-next-turn": ("--no-read-next-turn",)}
NEW_TEXT = "And what came of that in the end?"
# Earlier replies stand behind a mark: their K/V is of no use then, as where thinking is dropped.
REWORDING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ '(said) ' if m['role'] == 'assistant' else '' }}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Message = dict[str, str]


@contextmanager
def reworded() -> Iterator[str]:
    """The path of the template REWORDING."""
    with NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(REWORDING)
        file.flush()
        yield file.name


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def streamed(server: Server, messages: list[Message], max_tokens: int) -> tuple[float, str, int]:
    """Milliseconds to a chat's first text, its reply, and how many tokens of the prompt were computed."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection(server.host, server.port, timeout=120)
    connection.connect()
    content = json.dumps(body).encode()
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    first_ms, text, num_computed = read_reply(connection.getresponse(), began)
    connection.close()
    return first_ms, text, num_computed


def read_reply(response: HTTPResponse, began: float) -> tuple[float, str, int]:
    """The same, of the events of a response."""
    first_ms, text = 0.0, ""
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            said = choice["delta"].get("content") or ""
            first_ms = first_ms or (1e3 * (time.perf_counter() - began) if said else 0.0)
            text += said
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first_ms, text, usage["prompt_tokens"] - cached


def pair(server: Server, chat: Prompt, short: Prompt) -> tuple[float, float, int]:
    """Milliseconds of a chat's second turn and of a short prompt; the tokens that the turn computed."""
    opening = [user(chat.text)]
    _, reply, _ = streamed(server, opening, REPLY_TOKENS)
    time.sleep(PAUSE_S)
    messages = [*opening, {"role": "assistant", "content": reply}, user(NEW_TEXT)]
    second_ms, _, num_computed = streamed(server, messages, 1)
    time.sleep(PAUSE_S)
    short_ms, _, _ = streamed(server, [user(short.text)], 1)
    time.sleep(PAUSE_S)
    return second_ms, short_ms, num_computed


def read_ahead_tokens(server: Server) -> str:
    """What the server counted of tokens read ahead."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return "; ".join(line for line in lines if line.startswith("slipstream_next_turn_tokens_total"))


def run_turns(context: BenchContext) -> list[Section]:
    """The section `turns` with its bar."""
    section = Section(
        "turns", f"second turn of a {CHAT_TOKENS}-token chat, idle server, whose template rewords"
    )
    for case, flags in CASES.items():
        second, short, ratios, computed = [], [], [], []
        with ExitStack() as stack:
            template = stack.enter_context(reworded())
            server = stack.enter_context(Server(*context.flags, *flags, "--chat-template", template))
            server.wait_ready()
            for run in range(context.runs):
                context.say(f"turns, {case}, run {run + 1}/{context.runs}")
                chats = prompts_of(context.words, PAIRS, CHAT_TOKENS, seed=run)
                shorts = prompts_of(context.words, PAIRS, SHORT_TOKENS, seed=-1 - run)
                pairs = [pair(server, *both) for both in zip(chats, shorts, strict=True)]
                second.append(statistics.median(each[0] for each in pairs))
                short.append(statistics.median(each[1] for each in pairs))
                ratios.append(second[-1] / short[-1])
                computed.append(float(statistics.median(each[2] for each in pairs)))
            context.say(read_ahead_tokens(server))
        section.add(case, "second turn", "ms", second)
        section.add(case, f"{SHORT_TOKENS}-token prompt", "ms", short)
        section.add(case, "computed", "tokens", computed)
        ratio = section.add(case, "second turn / short", "x", ratios)
        if not flags:
            section.bars.append(
                Bar("second turn over a short prompt", BAR, "x", ratio.median, at_least=False)
            )
    return [section]
