"""What reading a reply costs: about its length, whatever the model writes and however it comes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from engine.text.reply.text_feed import Stage
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.input_text import InputText
from engine.text.tools.tool_formats import TOOL_FORMATS
from engine.text.tools.tool_spec import ToolRules, ToolSpec

RULES = ToolRules([ToolSpec("f")])
SLOW_S = 5.0  # many times what they take; the square of their length takes many times that


def seconds(name: str, parts: Sequence[str]) -> float:
    """What reading these parts of a reply in one format takes."""
    form = TOOL_FORMATS[name]
    stage = Stage(lambda feed, tell: form.read(feed, CallTeller(RULES, tell)))
    started = time.process_time()
    for part in parts:
        stage.feed(part)
    stage.finish(cut=False)
    return time.process_time() - started


@pytest.mark.parametrize(
    ("name", "part"),
    [("kimi-k2", "<|tool_call_begin|>"), ("gpt-oss", "<|channel|>"), ("qwen3-coder", "<function=")],
)
def test_a_whole_reply_of_marks_is_read_in_no_time(name: str, part: str) -> None:
    assert seconds(name, [part * 30_000]) < SLOW_S


@pytest.mark.parametrize("head", ['{"name": "', "{ "])
def test_a_call_whose_name_does_not_end_is_read_in_no_time(head: str) -> None:
    assert seconds("hermes", [f"<tool_call>{head}", *["    "] * 30_000]) < SLOW_S


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
    ],
)
def test_a_long_argument_is_read_in_no_time(name: str, head: str) -> None:
    assert seconds(name, [head, *["lo n"] * 100_000]) < SLOW_S


def test_an_input_that_does_not_begin_is_looked_for_in_no_time() -> None:
    found = InputText()
    started = time.process_time()
    for part in ["{", *["    "] * 30_000]:
        assert found.feed(part) == ""
    assert time.process_time() - started < SLOW_S
