"""Which format a model's replies are read by: found from templates and vocabulary, or insisted on."""

from __future__ import annotations

import pytest

from config.reply_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from engine.text.reply.reasoning_format import REASONING_FORMATS, find_reasoning
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.tools.tool_formats import TOOL_FORMATS

NOTHING = Spelling([], lambda text: [], {}, {})

# What the templates of well-known models say about thinking, cut down to the lines that tell them apart.
THINKS = {
    "qwen3": "{{- '<think>\\n\\n</think>\\n\\n' }}",
    "deepseek-r1": "{% set content = content.split('</think>')[-1] %}",
    "gpt-oss": "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}",
    "gemma4": "{{- '<|channel>thought\\n' -}}{{- thinking_text -}}{{- '\\n<channel|>' -}}",
    "granite": "Write your thoughts after 'Here is my thought process:' and 'Here is my response:'",
    "granite33": "Write your thoughts between <think></think> and the answer between <response></response>",
    "magistral": "[THINK]{{ part.thinking }}[/THINK]",
    "seed-oss": "{{ '<seed:think>' + message.reasoning_content + '</seed:think>' }}",
    "kimi-vl": "◁think▷",
}


@pytest.mark.parametrize("name", THINKS)
def test_reasoning_is_found_in_the_template(name: str) -> None:
    assert find_reasoning(THINKS[name], ()) == REASONING_FORMATS[name]


def test_reasoning_is_found_in_the_vocabulary() -> None:
    assert find_reasoning("{{ messages }}", ["<think>", "</think>"]) == REASONING_FORMATS["qwen3"]
    assert find_reasoning("{{ messages }}", ["<think>"]) is None
    assert find_reasoning(None, ()) is None


def test_a_name_is_insisted_on() -> None:
    template = THINKS["qwen3"]
    assert ReplyFormat.find(template, None, NOTHING, reasoning="none").reasoning is None
    named = ReplyFormat.find(template, None, NOTHING, reasoning="magistral", tools="mistral")
    assert named.reasoning == REASONING_FORMATS["magistral"]
    assert named.tools is TOOL_FORMATS["mistral"]


def test_the_settings_know_every_name() -> None:
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
    assert set(TOOL_CALL_PARSERS) == set(TOOL_FORMATS)
