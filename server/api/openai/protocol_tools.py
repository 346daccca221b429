"""The parts of a chat request that are about tools: definitions, the choice among them, and earlier calls."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import from_json

from engine import NO_PARAMETERS, ToolChoice, ToolSpec
from server.api.openai.protocol_values import (
    MAX_SCHEMA_CHARS,
    BodyPart,
    check_num_values,
    depths_of,
    refuse,
)
from server.http.json_body import find_too_many

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_SCHEMA_DEPTH = 64
MAX_DESCRIPTION = 16_384

_NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"


def check_tool_choice(value: object) -> ToolChoice:
    """OpenAI's three words, or an object that names a function."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': '...'}}")
    return ToolChoice("required", name)


def check_function_name(value: str) -> str:
    """A name that every model can write."""
    if re.fullmatch(_NAME_PATTERN, value) is None:
        refuse("must have 1 to 64 letters, digits, '_' and '-' only")
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
    """The arguments of an earlier call: the text of a JSON object; none at all is an empty one."""
    if not isinstance(value, str):
        refuse("must be a string that holds a JSON object")
    if (too_many := find_too_many(value.encode("utf-8", "replace"))) is not None:
        refuse(f"holds {too_many}")
    try:
        arguments = from_json(value, allow_inf_nan=False) if value.strip() else {}
    except ValueError:
        refuse("must be a string that holds a JSON object; it is not valid JSON")
    if not isinstance(arguments, dict):
        refuse("must be a string that holds a JSON object")
    return arguments


_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function", "description": "Always `function`."},
                "function": {
                    "type": "object",
                    "description": "The function that the reply must call.",
                    "properties": {"name": {"type": "string", "description": "One of `tools`."}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
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


FunctionName = Annotated[str, AfterValidator(check_function_name), _described({"pattern": _NAME_PATTERN})]
Choice = Annotated[ToolChoice, PlainValidator(check_tool_choice, Any), _described(_CHOICE_SCHEMA)]
Parameters = Annotated[dict[str, Any], PlainValidator(check_parameters, Any), _described(_PARAMETERS_SCHEMA)]
Arguments = Annotated[dict[str, Any], PlainValidator(check_arguments, Any), _described(_ARGUMENTS_SCHEMA)]


class FunctionDefinition(BodyPart):
    """A function that the model may call."""

    name: FunctionName
    """The function's name: letters, digits, `_` and `-`."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What the function does; the model reads it."""
    parameters: Parameters | None = None
    """The JSON schema of its arguments, an object. Left out: it takes none."""
    strict: bool | None = None
    """Whether all calls match `parameters`, those that the model makes of its own accord, too."""


class Tool(BodyPart):
    """One entry of `tools`."""

    type: Literal["function"]
    """Always `function`."""
    function: FunctionDefinition
    """The function."""

    def spec(self) -> ToolSpec:
        """The tool in the engine's words."""
        function = self.function
        return ToolSpec(function.name, function.description, function.parameters, bool(function.strict))


def check_tools(tools: list[Tool]) -> list[Tool]:
    """Every name once."""
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        refuse(f"has more than one function named '{twice}'")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_tools)]


class CalledFunction(BodyPart):
    """What an earlier message called, with what."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The function that was called."""
    arguments: Arguments
    """The arguments it was called with: the text of a JSON object."""


class ToolCall(BodyPart):
    """A call in an earlier message of the assistant."""

    id: str | None = None
    """The call's id, which a `tool` message answers."""
    type: Literal["function"] = "function"
    """Always `function`."""
    function: CalledFunction
    """What was called, with what."""

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it: with the arguments as an object, not as text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        own_id = {} if self.id is None else {"id": self.id}
        return {**own_id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
