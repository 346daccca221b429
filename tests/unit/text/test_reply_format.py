"""Which format a model's replies are read by: found from templates and vocabulary, or insisted on."""

from __future__ import annotations

import pytest

from config.reply_parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from engine.text.reply.pieces import CollectedReply
from engine.text.reply.reasoning_format import REASONING_FORMATS, find_reasoning
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.structured_output import StructuredOutput
from engine.text.tools.tool_formats import TOOL_FORMATS, find_tools
from engine.text.tools.tool_spec import ToolChoice, ToolRules, ToolSpec

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


# The same of tools; the names of functions are left out of some.
CALLS = {
    "hermes": "return a json object within <tool_call></tool_call> XML tags",
    "llama3": "{{- '<|python_tag|>' + tool_call.name + '.call(' }}",
    "llama4": "{{- '<|python_start|>' + message['content'] + '<|python_end|>' }}",
    "gemma3": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "functiongemma": "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "mistral-named": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "qwen3-coder": "'<tool_call>\\n<function=' + tool_call.name + '>\\n' '<parameter=' + args_name + '>\\n'",
    "seed-oss": "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "minimax-m2": '<minimax:tool_call>\\n<invoke name="tool-name-1">',
    "deepseek-v3": "{{'<｜tool▁calls▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'}}",
    "deepseek-v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}",
    "kimi-k2": "{{- '<|im_system|>tool_declare<|im_middle|>' -}}",
    "granite": "produce <|tool_call|> followed by a JSON list of tools used",
    "nemotron": '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>',
    "phi4-mini": "{{- '<|tool|>' + (tool['function'] | tojson) + '<|/tool|><|tool_call|>' -}}",
    "lfm2": '{{- "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" -}}',
    "gpt-oss": "{{- '<|start|>assistant<|channel|>commentary to=functions.' + name }}",
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_format_of_calls_is_found_in_the_template(name: str) -> None:
    assert find_tools(CALLS[name]) is TOOL_FORMATS[name]


def test_calls_in_no_known_way_are_no_other_format_s() -> None:
    template = "{{ tools }}<function_call> {name} </function_call>"
    assert not ReplyFormat.find(template, template, NOTHING).knows_calls
    assert ReplyFormat.find(template, template, NOTHING, tools="hermes").knows_calls
    assert ReplyFormat.find(template, None, NOTHING).knows_calls


# Replies as messages with headers, over a vocabulary of characters.

HARMONY_REPLY = (
    "<|channel|>analysis<|message|>I think.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Hm. <|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1}<|call|><|start|>assistant<|channel|>analysis<|message|> More.<|end|>'
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)


def channels() -> ReplyFormat:
    table = [chr(token_id).encode() for token_id in range(0x2600)]
    spelling = Spelling(table, lambda text: [ord(char) for char in text], {}, {})
    return ReplyFormat.find(None, None, spelling, reasoning="gpt-oss", tools="gpt-oss")


@pytest.mark.parametrize("size", range(0, len(HARMONY_REPLY) + 1))
def test_headers_are_never_told(size: int) -> None:
    rules = ToolRules([ToolSpec("add")])
    whole = channels().reader([1], rules).whole(HARMONY_REPLY)
    assert (whole.reasoning, whole.content) == ("I think. More.", "Hm. Yes.")
    assert [(call.name, call.arguments) for call in whole.calls] == [("add", '{"a": 1}')]
    plain = channels().reader([1]).whole(HARMONY_REPLY)
    assert (plain.reasoning, plain.content) == ("I think. More.", 'Hm. {"a": 1}Yes.')
    for parts, cut in (([HARMONY_REPLY[:size]], True), ([HARMONY_REPLY[:size], HARMONY_REPLY[size:]], False)):
        reader = channels().reader([1], rules)
        found = CollectedReply.of([piece for part in parts for piece in reader.read(part)]
                                  + reader.read("", ended=True, cut=cut))  # fmt: skip
        if cut:
            assert whole.reasoning.startswith(found.reasoning) and whole.content.startswith(found.content)
        else:
            assert (found.reasoning, found.content) == (whole.reasoning, whole.content)


def test_a_reply_that_has_a_form_follows_the_header_of_an_answer() -> None:
    form = channels()
    lead = "<|start|>assistant<|channel|>final<|message|>"
    assert form.led(StructuredOutput("json_object")) == StructuredOutput("json_object", lead=lead)
    rules = ToolRules([ToolSpec("add")], ToolChoice("required"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    thought = "<|channel|>analysis<|message|>I think.<|end|>"
    found = form.reader([1], rules, has_form=True).whole(thought + form.forced(rules).lead + call)
    assert (found.reasoning, found.content) == ("I think.", "")
    assert [(each.name, each.arguments) for each in found.calls] == [("add", '{"a": 1}')]


def test_a_name_is_insisted_on() -> None:
    template = THINKS["qwen3"]
    assert ReplyFormat.find(template, None, NOTHING, reasoning="none").reasoning is None
    named = ReplyFormat.find(template, None, NOTHING, reasoning="magistral", tools="mistral")
    assert named.reasoning == REASONING_FORMATS["magistral"]
    assert named.tools is TOOL_FORMATS["mistral"]


def test_the_settings_know_every_name() -> None:
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
    assert set(TOOL_CALL_PARSERS) == set(TOOL_FORMATS)
