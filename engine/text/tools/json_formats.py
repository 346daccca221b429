"""The formats whose calls are JSON objects of a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from engine.text.structured_output import CallForms, Frame, StructuredOutput
from engine.text.tools.json_calls import JsonMarks, read_json_calls
from engine.text.tools.kept_calls import named_objects
from engine.text.tools.tool_format import ToolFormat, forced_list, forced_objects, num_forced
from engine.text.tools.tool_spec import ToolRules, ToolSpec

_MISTRAL_ID_CHARS = 9


def _hermes_forced(rules: ToolRules) -> StructuredOutput:
    frame = Frame("<tool_call>\n", "\n</tool_call>", "\n", num_forced(rules))
    return forced_objects(rules, "arguments", frame)


def _llama_forced(rules: ToolRules) -> StructuredOutput:
    """One call: that is all its templates take back."""
    return forced_objects(rules, "parameters", None)


def _kept(
    openings: tuple[str, ...], after: str = "", *, in_lists: bool = False
) -> Callable[[Sequence[ToolSpec]], CallForms]:
    """One object behind each mark; lists of them, too, where templates show both."""
    return lambda tools: named_objects(tools, openings, "arguments", after, in_lists=in_lists)


def _llama_kept(tools: Sequence[ToolSpec]) -> CallForms:
    found = named_objects(tools, ("<|python_tag|>", ""), "parameters", "")
    names = "|".join(re.escape(tool.name) for tool in tools)
    return replace(found, bare=f'\\s*\\[?\\s*\\{{\\s*"name"\\s*:\\s*"({names})"')


def mistral_id(call_id: str) -> str:
    """Its templates take ids of nine letters and digits only, so others become such ones."""
    if len(call_id) == _MISTRAL_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:_MISTRAL_ID_CHARS]


HERMES = ToolFormat(
    signs=(("<tool_call>",),),
    openings=("<tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
    read=partial(read_json_calls, JsonMarks(("<tool_call>",), ("</tool_call>",))),
    forced=_hermes_forced,
    kept=_kept(("<tool_call>",), "\n</tool_call>"),
)
LLAMA3 = ToolFormat(
    # Small models of the family have no tag; the prompt describes the format in words.
    signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
    openings=("<|python_tag|>",),
    marks=("<|python_tag|>",),
    read=partial(read_json_calls, JsonMarks(("<|python_tag|>",), bare=True)),
    forced=_llama_forced,
    kept=_llama_kept,
)
NEMOTRON = ToolFormat(
    signs=(("<TOOLCALL>",),),
    openings=("<TOOLCALL>",),
    marks=("<TOOLCALL>", "</TOOLCALL>"),
    read=partial(read_json_calls, JsonMarks(("<TOOLCALL>",), ("</TOOLCALL>",))),
    forced=lambda rules: forced_list(rules, "arguments", Frame("<TOOLCALL>", "</TOOLCALL>")),
    kept=_kept(("<TOOLCALL>",), "</TOOLCALL>"),
)
GRANITE = ToolFormat(
    signs=(("<|tool_call|>",),),
    openings=("<|tool_call|>", "<tool_call>"),
    marks=("<|tool_call|>", "<tool_call>"),
    read=partial(read_json_calls, JsonMarks(("<|tool_call|>", "<tool_call>"))),
    forced=lambda rules: forced_list(rules, "arguments", Frame("<|tool_call|>")),
    kept=_kept(("<|tool_call|>", "<tool_call>"), in_lists=True),
)
PHI4_MINI = ToolFormat(
    signs=(("<|tool|>",),),
    openings=("functools", "<|tool_call|>"),
    marks=("functools", "<|tool_call|>", "<|/tool_call|>"),
    read=partial(read_json_calls, JsonMarks(("functools", "<|tool_call|>"), ("<|/tool_call|>",))),
    forced=lambda rules: forced_list(rules, "arguments", Frame("functools")),
    kept=_kept(("functools", "<|tool_call|>"), in_lists=True),
)
MISTRAL = ToolFormat(
    signs=(("[TOOL_CALLS]",),),
    openings=("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]",),
    read=partial(read_json_calls, JsonMarks(("[TOOL_CALLS]",))),
    forced=lambda rules: forced_list(rules, "arguments", Frame("[TOOL_CALLS]")),
    kept=_kept(("[TOOL_CALLS]",)),
    shown_id=mistral_id,
)
