"""`slipstream serve` on a terminal: what a person reads from the start to the end."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.e2e.terminal import Terminal
from tests.e2e.wire import ask
from tests.support.tiny_models import save_tiny_model

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def screen(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Everything that a server writes which answers three requests and refuses one."""
    folder = tmp_path_factory.mktemp("terminal")
    model = save_tiny_model("llama", folder / "tiny")

    async def load(url: str) -> None:
        for _ in range(2):
            body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            assert (await ask(url, "POST", COMPLETION, body)).status == 200
        assert (await ask(url, "POST", COMPLETION, {"prompt": "x", "model": "other"})).status == 404

    async def run() -> str:
        env = {"SLIPSTREAM_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        flags = ("--port", "0", "--served-model-name", "tiny")
        with Terminal("serve", str(model), *flags, env=env) as terminal:
            start = await terminal.expect(r"status page +http\S+/\n")
            (url,) = re.findall(r"status page +(http://\S+:\d+)/", start)
            await load(url)
            start += await terminal.expect(r"model_not_found\n")  # Ctrl-C discards what nobody has read yet
            terminal.say("\x03")
            assert await terminal.end() == 0
            assert "\x1b" not in terminal.raw
            return start + terminal.seen

    return asyncio.run(run()).replace("^C", "").splitlines()


def rows(screen: list[str], word: str) -> list[str]:
    return [line for line in screen if word in line]


def test_the_start_is_eight_lines_at_most_and_says_what_one_needs(screen: list[str]) -> None:
    (last,) = rows(screen, "status page")
    start = screen[: screen.index(last) + 1]
    assert len(start) <= 8
    text = "\n".join(start)
    for name in (
        "model        tiny, float32",
        "device       CPU, ",
        "kernels: ",
        "K/V room     ",
        " tokens (",
    ):
        assert name in text
    assert re.search(r"ready after [\d.]+ m?s; Ctrl-C ends it", text)
    assert re.search(r"API +http://127.0.0.1:\d+/v1$", text, re.MULTILINE)
    assert "%|" not in text and "Loading weights" not in text  # no library's progress bar
    assert all(line.strip() for line in start)


def test_a_request_is_one_short_row(screen: list[str]) -> None:
    first, _, refused = rows(screen, "completion  ")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  completion  200  3 tokens in, 8 out, [\d.]+ m?s, first after [\d.]+ m?s, "
        r"[\d,]+ tokens/s, cut at its limit",
        first,
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d  completion  404  [\d.]+ m?s, model_not_found", refused)
    assert len(first) <= 120


def test_the_report_at_the_end_is_lines_to_read(screen: list[str]) -> None:
    (head,) = rows(screen, "2 requests in ")
    report = screen[screen.index(head) :]
    assert any(re.search(r"tokens +16 generated, 6 of prompts read$", line) for line in report)
    (first_token,) = rows(report, "first token")
    assert re.search(r"after [\d.]+ m?s on average$", first_token)  # two have no percentiles
    assert not any("\\n" in line or re.search(r"\de[+-]\d", line) for line in report)
