"""The parts of a chat request that are about tools: definitions, the choice among them, and earlier calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from engine import INPUT_KEY, NO_PARAMETERS, StructuredOutput, StructureKind, ToolChoice, ToolSpec
from server.api.call_arguments import read_arguments
from server.api.openai.protocol_values import (
    MAX_SCHEMA_CHARS,
    BodyPart,
    check_num_values,
    depths_of,
    refuse,
)
from server.http.json_body import find_too_many

T = TypeVar("T")

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_SCHEMA_DEPTH = 64
MAX_DESCRIPTION = 16_384

_NAME_PATTERN = "^[a-zA-Z0-9_.-]{1,%d}$"
MAX_NAME = 64
MAX_LONG_NAME = 128  # in Anthropic's API, and in OpenAI's Responses


def check_tool_choice(value: object) -> ToolChoice:
    """OpenAI's three words, or an object that names a tool, or several that alone may be called."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"))
    name = _tool_name(value)
    if name is None:
        refuse("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': '...'}}")
    return ToolChoice("required", name)


def _tool_name(value: object) -> str | None:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in the same of a custom tool."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("function", "custom"):
        return None
    about = value.get(kind)
    name = about.get("name") if isinstance(about, dict) else None
    return name if isinstance(name, str) else None


def _allowed_tools(value: object) -> ToolChoice:
    mode = value.get("mode") if isinstance(value, dict) else None
    tools = value.get("tools") if isinstance(value, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        refuse("must have 'allowed_tools' with a 'mode' of 'auto' or 'required' and a list of 'tools'")
    names = [_tool_name(each) for each in tools]
    if len(names) > MAX_TOOLS or None in names:
        refuse(f"must allow at most {MAX_TOOLS} tools, each by its type and name")
    return ToolChoice(mode, allowed=frozenset(name for name in names if name is not None))


def check_function_call(value: object) -> ToolChoice:
    """The older choice: a word, or an object that names a function."""
    if value in ("none", "auto"):
        return ToolChoice(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        refuse("must be 'none', 'auto' or {'name': '...'}")
    return ToolChoice("required", name)


def check_function_name(value: str) -> str:
    """A name that every model can write."""
    return _check_name(value, MAX_NAME)


def _check_name(value: str, most: int) -> str:
    if re.fullmatch(_NAME_PATTERN % most, value) is None:
        refuse(f"must have 1 to {most} letters, digits, '_', '-' and '.' only")
    return value


def check_parameters(value: object) -> dict[str, Any]:
    """A function's parameters: the JSON schema of an object, within what structured output takes."""
    if not isinstance(value, dict):
        refuse("must be a JSON schema")
    check_num_values(value)
    if not value:
        return dict(NO_PARAMETERS)
    if value.get("type") != "object":
        refuse("must be the JSON schema of an object, with 'type': 'object'")
    if any(depth > MAX_SCHEMA_DEPTH for depth in depths_of(value)):
        refuse(f"is nested more deeply than {MAX_SCHEMA_DEPTH} levels")
    size = len(json.dumps(value, ensure_ascii=False))
    if size > MAX_SCHEMA_CHARS:
        refuse(f"has {size} characters; the limit is {MAX_SCHEMA_CHARS}")
    return value


def check_arguments(value: object) -> dict[str, Any]:
    """The arguments of an earlier call: the text of a JSON object; none at all is an empty one.

    Of a call that the end of its reply cut short they are as much as there is, and of what is not quite JSON
    what can be read: this server's own replies come back.
    """
    if not isinstance(value, str):
        refuse("must be a string that holds a JSON object")
    if (too_many := find_too_many(value.encode("utf-8", "replace"))) is not None:
        refuse(f"holds {too_many}")
    try:
        arguments = read_arguments(value)
    except ValueError:
        refuse("must be a string that holds a JSON object; it is not valid JSON")
    if not isinstance(arguments, dict):
        refuse("must be a string that holds a JSON object")
    return arguments


def _named_schema(kind: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "type": {"const": kind, "description": f"Always `{kind}`."},
            kind: {
                "type": "object",
                "description": "The tool that the reply must call.",
                "properties": {"name": {"type": "string", "description": "One of `tools`."}},
                "required": ["name"],
            },
        },
        "required": ["type", kind],
    }


_NAMED_SCHEMAS = [_named_schema("function"), _named_schema("custom")]
_ALLOWED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "The tools that alone may be called.",
    "properties": {
        "mode": {"enum": ["auto", "required"], "description": "Whether one of them must be called."},
        "tools": {
            "type": "array",
            "description": "Their types and names.",
            "items": {"anyOf": _NAMED_SCHEMAS},
            "minItems": 1,
            "maxItems": MAX_TOOLS,
        },
    },
    "required": ["mode", "tools"],
}
_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        *_NAMED_SCHEMAS,
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools", "description": "Always `allowed_tools`."},
                "allowed_tools": _ALLOWED_SCHEMA,
            },
            "required": ["type", "allowed_tools"],
        },
    ]
}
_FUNCTION_CALL_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto"]},
        {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "One of `functions`."}},
            "required": ["name"],
        },
    ]
}
_PARAMETERS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "object", "description": "Always `object`."}},
            "required": ["type"],
        },
        {"type": "object", "maxProperties": 0},
    ]
}
_ARGUMENTS_SCHEMA: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}


def _described(schema: dict[str, Any]) -> Any:
    return Field(json_schema_extra=lambda found: found.update(schema))


FunctionName = Annotated[
    str, AfterValidator(check_function_name), _described({"pattern": _NAME_PATTERN % MAX_NAME})
]
LongName = Annotated[
    str,
    AfterValidator(lambda value: _check_name(value, MAX_LONG_NAME)),
    _described({"pattern": _NAME_PATTERN % MAX_LONG_NAME}),
]
Choice = Annotated[ToolChoice, PlainValidator(check_tool_choice, Any), _described(_CHOICE_SCHEMA)]
FunctionCall = Annotated[
    ToolChoice, PlainValidator(check_function_call, Any), _described(_FUNCTION_CALL_SCHEMA)
]
Parameters = Annotated[dict[str, Any], PlainValidator(check_parameters, Any), _described(_PARAMETERS_SCHEMA)]
Arguments = Annotated[dict[str, Any], PlainValidator(check_arguments, Any), _described(_ARGUMENTS_SCHEMA)]


def _needed_for(kind: str) -> AfterValidator:
    """Refuse an object of this type that lacks the field."""

    def check(value: T, info: ValidationInfo) -> T:
        if value is None and info.data.get("type") == kind:
            refuse(f"is missing: the type is '{kind}'")
        return value

    return AfterValidator(check)


class FunctionDefinition(BodyPart):
    """A function that the model may call."""

    name: FunctionName
    """The function's name: letters, digits, `_`, `-` and `.`."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What the function does; the model reads it."""
    parameters: Parameters | None = None
    """The JSON schema of its arguments, an object. Left out: it takes none."""
    strict: bool | None = None
    """Whether calls that the model makes of its own accord match `parameters` as forced ones do, and have no
    keys that it does not name. Of a model that writes calls as JSON behind a mark; of others only forced
    calls match."""

    def spec(self) -> ToolSpec:
        """The function in the engine's words."""
        return ToolSpec(self.name, self.description, self.parameters, bool(self.strict))


class InputGrammar(BodyPart):
    """A grammar in one of two notations."""

    syntax: Literal["lark", "regex"]
    """Lark's notation, or a regular expression."""
    definition: Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_CHARS)]
    """The grammar itself."""


class InputFormat(BodyPart):
    """What the input of a custom tool is: any text, or text by a grammar."""

    type: Literal["text", "grammar"]
    """`text` is any text."""
    grammar: Annotated[InputGrammar | None, _needed_for("grammar")] = Field(None, validate_default=True)
    """The grammar, for `grammar`."""


class CustomDefinition(BodyPart):
    """A tool whose input is text."""

    name: FunctionName
    """The tool's name: letters, digits, `_`, `-` and `.`."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What the tool does; the model reads it."""
    format: InputFormat | None = None
    """What its input is. Left out: any text."""

    def spec(self) -> ToolSpec:
        """The tool in the engine's words."""
        form, given = None, self.format
        grammar = given.grammar if given is not None and given.type == "grammar" else None
        if grammar is not None:
            kind: StructureKind = "regex" if grammar.syntax == "regex" else "grammar"
            form = StructuredOutput(kind, grammar.definition, param="tools")
        return ToolSpec(self.name, self.description, is_custom=True, form=form)


class Tool(BodyPart):
    """One entry of `tools`."""

    type: Literal["function", "custom"]
    """`function` takes arguments, `custom` takes text."""
    function: Annotated[FunctionDefinition | None, _needed_for("function")] = Field(
        None, validate_default=True
    )
    """The function, for `function`."""
    custom: Annotated[CustomDefinition | None, _needed_for("custom")] = Field(None, validate_default=True)
    """The tool, for `custom`."""

    @property
    def definition(self) -> FunctionDefinition | CustomDefinition:
        """Whichever it is."""
        found = self.function if self.type == "function" else self.custom
        assert found is not None
        return found

    def spec(self) -> ToolSpec:
        """The tool in the engine's words."""
        return self.definition.spec()


def check_names(names: Sequence[str]) -> None:
    """Every name once."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        refuse(f"has more than one function named '{twice}'")


def check_tools(tools: list[Tool]) -> list[Tool]:
    """Every name once."""
    check_names([tool.definition.name for tool in tools])
    return tools


def check_functions(functions: list[FunctionDefinition]) -> list[FunctionDefinition]:
    """Every name once."""
    check_names([function.name for function in functions])
    return functions


_MANY = Field(max_length=MAX_TOOLS, fail_fast=True)
Tools = Annotated[list[Tool], _MANY, AfterValidator(check_tools)]
Functions = Annotated[list[FunctionDefinition], _MANY, AfterValidator(check_functions)]


class CalledFunction(BodyPart):
    """What an earlier message called, with what."""

    unread: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The function that was called."""
    arguments: Arguments
    """The arguments it was called with: the text of a JSON object."""


class CalledCustom(BodyPart):
    """Which custom tool an earlier message called, with what."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The tool that was called."""
    input: str
    """The text it was called with."""


class ToolCall(BodyPart):
    """A call in an earlier message of the assistant."""

    unread: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    """The call's id, which a `tool` message answers."""
    type: Literal["function", "custom"] = "function"
    """The kind of tool that was called."""
    function: Annotated[CalledFunction | None, _needed_for("function")] = Field(None, validate_default=True)
    """What was called, with what, for `function`."""
    custom: Annotated[CalledCustom | None, _needed_for("custom")] = Field(None, validate_default=True)
    """What was called, with what, for `custom`."""

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it: a function, with the arguments as an object, not as text."""
        if self.type == "custom" and self.custom is not None:
            called, arguments = self.custom.name, {INPUT_KEY: self.custom.input}
        else:
            assert self.function is not None
            called, arguments = self.function.name, self.function.arguments
        own_id = {} if self.id is None else {"id": self.id}
        return {**own_id, "type": "function", "function": {"name": called, "arguments": arguments}}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
