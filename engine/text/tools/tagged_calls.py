"""Calls whose arguments stand one by one between tags, as text: qwen3-coder, glm, minimax."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from engine.text.reply.text_feed import Parser, TextFeed, text_until
from engine.text.structured_output import (
    CallForm,
    CallForms,
    CallPart,
    Pattern,
    Repeated,
    StructuredOutput,
    TextUpTo,
)
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.kept_calls import SPACE, grammar_of, json_value, property_schemas
from engine.text.tools.tool_spec import ToolSpec

_MAX_NAME = 256
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_TYPES = frozenset(("type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"))


@dataclass(frozen=True, slots=True)
class Tags:
    """How calls stand in text: `section`, if any, around calls of `name`, then pairs of `key` and `value`.

    Each of the three is an opening and a closing tag. The name may be followed by a key at once (glm).
    """

    section: tuple[str, str] | None
    name: tuple[str, str]
    call_end: str
    key: tuple[str, str]
    value: tuple[str, str]

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts that a call may begin with; models leave out the section's at times."""
        return (self.name[0],) if self.section is None else (self.section[0], self.name[0])

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that a reader has to see."""
        pairs = (*self.name, *self.key, *self.value, *(self.section or ()), self.call_end)
        return tuple(mark for mark in dict.fromkeys(pairs) if mark.strip())


_NEWLINE = Pattern("\\n?")


def kept_tagged(tags: Tags, tools: Sequence[ToolSpec]) -> CallForms:
    """The calls as grammars hold them: arguments in the order of the schema."""
    forms = []
    for tool in tools:
        call: tuple[CallPart, ...] = (tool.name, *_kept_end_of_name(tags), *_kept_pairs(tags, tool))
        call = (*call, tags.call_end)
        forms.append(CallForm(tags.name[0], call))
        if tags.section is not None:
            forms.append(CallForm(tags.section[0], (SPACE, tags.name[0], *call, SPACE, tags.section[1])))
    return CallForms(tuple(forms))


def _kept_end_of_name(tags: Tags) -> tuple[CallPart, ...]:
    return (tags.name[1], _NEWLINE) if tags.name[1].strip() else (_NEWLINE,)


def _kept_pairs(tags: Tags, tool: ToolSpec) -> tuple[CallPart, ...]:
    schemas = property_schemas(tool)
    if schemas is None:
        free = (tags.key[0], TextUpTo(tags.key[1]), *_kept_value(tags, None), _NEWLINE)
        return (Repeated((free,), None),)
    pairs: list[CallPart] = []
    for key, (schema, is_required) in schemas.items():
        value = grammar_of(tool) or _text_form(schema)
        pair = (tags.key[0] + key + tags.key[1], *_kept_value(tags, value), _NEWLINE)
        pairs += pair if is_required else (Repeated((pair,)),)
    return tuple(pairs)


def _kept_value(tags: Tags, value: CallPart | None) -> tuple[CallPart, ...]:
    """A value in its tags; None: any text.

    Of text the reader takes one newline next to each tag for the tag's, so that one has to be there.
    """
    opening: tuple[CallPart, ...] = (_NEWLINE, tags.value[0]) if tags.value[0] else ()
    if value is None:
        return (*opening, TextUpTo(tags.value[1]))
    is_json = isinstance(value, StructuredOutput) and value.kind == "json_schema"
    around: CallPart = _NEWLINE if is_json else "\n"
    return (*opening, around, value, around, tags.value[1])


def _text_form(schema: Mapping[str, Any]) -> CallPart | None:
    """The form of an argument's text; None: any text."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(isinstance(each, str) for each in values):
        return StructuredOutput("choice", json.dumps(values))
    if not takes_only_text(schema):
        return json_value(schema)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if pattern.endswith("$") else "(.|\\n)*"
        return StructuredOutput("regex", f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return StructuredOutput("regex", f"(.|\\n){{{least},{most}}}") if least or most != "" else None


def read_tagged_calls(tags: Tags, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. A text is told as it comes, another argument when its closing tag has come."""
    while True:
        mark = yield from teller.copy_until(feed, tags.openings)
        if mark is None:
            return
        before: str | None = feed.space + mark
        if tags.section is not None and mark == tags.section[0]:
            before = yield from _enter_section(tags, feed.space + mark, feed, teller)
        while before is not None:
            before = yield from _read_call(tags, before, feed, teller)
            if before is not None:
                before = yield from _next_call(tags, feed)


def _enter_section(tags: Tags, before: str, feed: TextFeed, teller: CallTeller) -> Parser:
    """All text up to the first call, behind a section's opening tag; None where there is no call."""
    before += yield from feed.skip_space()
    if (yield from feed.starts((tags.name[0],))) is not None:
        return before + feed.take(len(tags.name[0]))
    if not (feed.ended and feed.cut):
        teller.content(before)
    elif tags.name[0].startswith(feed.text):
        feed.text = ""
    return None


def _next_call(tags: Tags, feed: TextFeed) -> Parser:
    """The text up to the next call, behind a call; None, with the section closed, where there is none."""
    space = yield from feed.skip_space()
    endings = (tags.name[0],) if tags.section is None else (tags.section[1], tags.name[0])
    found = yield from feed.starts(endings)
    if found is not None:
        feed.take(len(found))
        return space + found if found == tags.name[0] else None
    if feed.ended and feed.cut and any(each.startswith(feed.text) for each in endings):
        feed.text = ""
    feed.text = space + feed.text if feed.text else ""
    return None


def _read_call(tags: Tags, before: str, feed: TextFeed, teller: CallTeller) -> Parser:
    """One call behind its opening tag; None where there is none, and then `before` is content.

    Else an empty text.
    """
    stops = tuple(dict.fromkeys((tags.name[1], tags.key[0], tags.call_end)))
    head = yield from text_until(feed, stops, _MAX_NAME)
    if head is None:
        if not (feed.ended and feed.cut):
            teller.content(before)
        else:
            feed.text = ""
        return None
    text, stop = head
    name = text.strip()
    if not teller.knows(name):
        teller.content(before + text + stop)
        return None
    teller.start(name)
    ends_at_name = stop == tags.name[1] and tags.name[1] not in (tags.key[0], tags.call_end)
    stop = "" if ends_at_name else stop
    separator = "{"
    while stop != tags.call_end:
        if not stop:
            between = yield from text_until(feed, (tags.key[0], tags.call_end))
            if between is None:
                feed.text = ""
                return None
            stop = between[1]
            continue
        key = yield from _read_key(tags, feed)
        if key is not None:
            before_value = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            is_whole = yield from _read_value(tags, feed, teller, before_value, teller.schema_of(name, key))
        if key is None or not is_whole:  # the reply has ended within the call
            feed.text = ""
            return None
        separator, stop = ", ", ""
    teller.arguments("{}" if separator == "{" else "}")
    teller.end()
    return ""


def _read_key(tags: Tags, feed: TextFeed) -> Parser:
    """A key, behind its opening tag, and the opening tag of its value; None where the reply ends before."""
    key = yield from text_until(feed, (tags.key[1],))
    if key is None or (tags.value[0] and (yield from text_until(feed, (tags.value[0],))) is None):
        return None
    return key[0].strip()


def _read_value(
    tags: Tags, feed: TextFeed, teller: CallTeller, before: str, schema: Mapping[str, Any]
) -> Parser:
    """Tell what stands `before` a value, and it, behind its opening tag; False where the reply ends in it."""
    if takes_only_text(schema):
        teller.arguments(before + '"')
        if (yield from feed.starts(("\n",))) is not None:  # one next to each tag belongs to the tag
            feed.take(1)
        return (yield from teller.tell_text(feed, (f"\n{tags.value[1]}", tags.value[1])))
    value = yield from text_until(feed, (tags.value[1],))
    if value is None:
        return False
    teller.arguments(before + argument_of(value[0], schema))
    return True


def argument_of(text: str, schema: Mapping[str, Any]) -> str:
    """An argument as JSON: text stays text where the schema takes it, and is JSON where it takes that.

    One newline next to each tag belongs to the tag.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    if not takes_only_text(schema):
        try:
            value = from_json(text.strip(), allow_inf_nan=False)
        except ValueError:
            value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        if isinstance(value, str):
            is_meant = _names_a_type(schema)
        else:  # an optional text, too, may look like a number
            is_meant = _takes(schema, value) or not _takes(schema, text)
        if is_meant:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def takes_only_text(schema: Mapping[str, Any]) -> bool:
    """True for a string, or one of several strings."""
    kind, values = schema.get("type"), schema.get("enum")
    if isinstance(values, list):
        return all(isinstance(each, str) for each in values)
    return kind == "string" or kind == ["string"]


def _takes(schema: Mapping[str, Any], value: object) -> bool:
    """False where the schema says plainly that it has no place for the value."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return json.dumps(value) in map(json.dumps, values)
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        return any(_takes(each, value) for each in options if isinstance(each, dict))
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    return not isinstance(kinds, list) or any(type(value) in _KINDS.get(str(kind), ()) for kind in kinds)


def _names_a_type(schema: Mapping[str, Any]) -> bool:
    return not _TYPES.isdisjoint(schema)
