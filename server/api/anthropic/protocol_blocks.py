"""The content blocks of messages: what clients write, and what they give back of earlier replies.

`cache_control` may stand on any block and is not read: the prefix cache needs no marks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, PlainValidator, Tag

from server.api.openai.protocol_values import BodyPart, refuse, type_of

MAX_BLOCKS = 8192
_IMAGES = frozenset({"image", "container_upload"})


class TextBlock(BodyPart):
    """Text."""

    type: Literal["text"]
    """Always `text`."""
    text: str
    """The text."""


class ThinkingBlock(BodyPart):
    """What the model thought in an earlier reply; any signature will do."""

    type: Literal["thinking"]
    """Always `thinking`."""
    thinking: str
    """The thoughts."""


class ToolUseBlock(BodyPart):
    """A call that the model made."""

    type: Literal["tool_use"]
    """Always `tool_use`."""
    id: Annotated[str, Field(min_length=1, max_length=256)]
    """The call's id, which a result answers."""
    name: Annotated[str, Field(min_length=1, max_length=256)]
    """The tool that was called."""
    input: dict[str, Any]
    """The arguments it was called with."""


def check_shown(value: object) -> str:
    """What a tool gave, or a document holds, as text: a string, or blocks that a text model can read."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("must be a string or a list of blocks")
    return "\n".join(text for text in map(_shown_block, value) if text)


def _shown_block(block: object) -> str:
    kind = type_of(block)
    if not isinstance(block, dict) or kind is None:
        refuse("must hold blocks, such as {'type': 'text', 'text': '...'}")
    if kind in _IMAGES:
        refuse(f"holds a block of type '{kind}': the model reads only text")
    if kind == "document":
        return _document(block)
    if kind == "search_result":
        parts = (block.get("title"), block.get("source"), check_shown(block.get("content")))
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    if kind != "text":
        return ""
    if not isinstance(block.get("text"), str):
        refuse("has a text block without 'text'")
    return str(block["text"])


def _document(block: dict[str, Any]) -> str:
    found = block.get("source")
    source: dict[str, Any] = found if isinstance(found, dict) else {}
    kind = type_of(source)
    if kind == "text" and isinstance(source.get("data"), str):
        text = str(source["data"])
    elif kind == "content":
        text = check_shown(source.get("content"))
    else:
        refuse("holds a document that is not plain text: the model reads only text")
    parts = (block.get("title"), block.get("context"), text)
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _check_block(value: object) -> str:
    return _shown_block(value)


_SHOWN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "text", "description": "Always `text`."},
                    "text": {"type": "string", "description": "The text."},
                },
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}
_DOCUMENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "document", "description": "Always `document`."},
        "source": {
            "type": "object",
            "description": "Where its text is.",
            "properties": {
                "type": {"const": "text", "description": "Always `text`."},
                "data": {"type": "string", "description": "The text."},
            },
            "required": ["type", "data"],
        },
    },
    "required": ["type", "source"],
}


def _described(schema: dict[str, Any]) -> Any:
    return Field(json_schema_extra=lambda found: found.update(schema))


Shown = Annotated[str, PlainValidator(check_shown, Any), _described(_SHOWN_SCHEMA)]
# A document or the like, as the text it holds.
ShownBlock = Annotated[str, PlainValidator(_check_block, Any), _described(_DOCUMENT_SCHEMA)]


class ToolResultBlock(BodyPart):
    """What a call gave."""

    type: Literal["tool_result"]
    """Always `tool_result`."""
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    """The id of the call that it answers."""
    content: Shown = ""
    """What the tool gave: a string, or blocks of text."""
    is_error: bool | None = None
    """Whether the call failed."""


class HostedBlock(BodyPart):
    """Any other block, such as what a tool of Anthropic's own left: nothing that a model here could read."""

    type: Annotated[str, Field(max_length=128)]
    """The block's type, which the header `x-slipstream-ignored` names."""


def _tag_of(value: object) -> str:
    if isinstance(value, str):
        return "<shown>"
    kind = type_of(value)
    if kind in ("text", "thinking", "tool_use", "tool_result"):
        return f"<{kind}>"
    return "<shown>" if kind in _IMAGES or kind in ("document", "search_result") else "<hosted>"


ContentBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ShownBlock, Tag("<shown>")]
    | Annotated[HostedBlock, Tag("<hosted>")],
    Discriminator(_tag_of),
]


def hosted_kinds(blocks: Iterable[ContentBlock]) -> list[str]:
    """The types of blocks that are skipped, each once, as `messages.TYPE`."""
    return list(dict.fromkeys(f"messages.{each.type}" for each in blocks if isinstance(each, HostedBlock)))
