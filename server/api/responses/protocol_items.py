"""The items of a response's input: what clients write, and what they give back of earlier output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from server.api.openai.protocol_tools import Arguments
from server.api.openai.protocol_values import BodyPart, refuse, type_of

MAX_ITEMS = 8192
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_OTHER_PARTS = frozenset({"input_image", "input_file", "input_audio"})

_PART_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": sorted(_TEXT_PARTS), "description": "Whose text it is."},
                "text": {"type": "string", "description": "The part's text."},
            },
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "refusal", "description": "Always `refusal`."},
                "refusal": {"type": "string", "description": "What the model said in place of an answer."},
            },
            "required": ["type", "refusal"],
        },
    ]
}
_TEXT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}


def check_text(value: object) -> str:
    """The text of a message or an output: a string, or parts, which are joined by newlines as in chats."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("must be a string or a list of text parts")
    return "\n".join(map(_part_text, value))


def _part_text(part: object) -> str:
    kind = type_of(part)
    if kind in _OTHER_PARTS:
        refuse(f"holds a part of type '{kind}': the model reads only text")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key) if isinstance(part, dict) and (kind in _TEXT_PARTS or kind == key) else None
    if not isinstance(text, str):
        refuse("must hold text parts only, such as {'type': 'input_text', 'text': '...'}")
    return text


def _described(schema: dict[str, Any]) -> Any:
    return Field(json_schema_extra=lambda found: found.update(schema))


Text = Annotated[str, PlainValidator(check_text, Any), _described(_TEXT_SCHEMA)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Item(BodyPart):
    """What all items have; the fields that only tell of them are not read."""

    id: str | None = None
    """The item's id in the response that it comes from. It is not read."""


class MessageItem(Item):
    """A message of anyone, in the easy form or as a response had it."""

    type: Literal["message"] = "message"
    """Always `message`."""
    role: Literal["user", "assistant", "system", "developer"]
    """Who speaks. `developer` is another name for `system`; both may speak anywhere."""
    content: Text
    """The text: a string, or text parts, which are joined by newlines."""


class FunctionCallItem(Item):
    """A call that the model made."""

    type: Literal["function_call"]
    """Always `function_call`."""
    call_id: CallId
    """The call's id, which an output answers."""
    name: Name
    """The tool that was called."""
    namespace: str | None = None
    """The group that the tool is of, if it is of one."""
    arguments: Arguments
    """The arguments it was called with: the text of a JSON object."""


class CustomCallItem(Item):
    """A call of a tool whose input is free text."""

    type: Literal["custom_tool_call"]
    """Always `custom_tool_call`."""
    call_id: CallId
    """The call's id, which an output answers."""
    name: Name
    """The tool that was called."""
    namespace: str | None = None
    """The group that the tool is of, if it is of one."""
    input: str
    """The text it was called with."""


class CallOutputItem(Item):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    """Which kind of call it answers."""
    call_id: CallId
    """The id of that call."""
    output: Text
    """What the tool gave: a string, or text parts, which are joined by newlines."""


class ReasoningItem(Item):
    """What the model thought: its text, or what this server made of that for a client that stores nothing."""

    type: Literal["reasoning"]
    """Always `reasoning`."""
    summary: Text = ""
    """A summary of the thoughts. It is read only where their text is missing."""
    content: Annotated[Text, BeforeValidator(lambda value: "" if value is None else value)] = ""
    """The thoughts: text parts of type `reasoning_text`."""
    encrypted_content: str | None = None
    """The thoughts as this server gave them for `include: ["reasoning.encrypted_content"]`."""


class ReferenceItem(Item):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    """Always `item_reference`."""
    id: str
    """The id of an item of a stored response's output."""


class HostedItem(Item):
    """Any other item, such as what a tool of OpenAI's own left: nothing that a model here could read."""

    type: Annotated[str, Field(max_length=128)]
    """The item's type, which the header `x-slipstream-ignored` names."""


def _tag_of(value: object) -> str:
    """Messages and references may leave their type out."""
    kind = type_of(value)
    if isinstance(value, dict) and value.get("type") is None:
        kind = "message" if "role" in value else "item_reference"
    return f"<{kind}>" if kind in _KINDS else "<hosted>"


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[HostedItem, Tag("<hosted>")],
    Discriminator(_tag_of),
]
_KINDS = frozenset(
    {
        "message",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    }
)


def hosted_kinds(items: Iterable[InputItem]) -> list[str]:
    """The types of items that are skipped, each once, as `input.TYPE`."""
    return list(dict.fromkeys(f"input.{item.type}" for item in items if isinstance(item, HostedItem)))
