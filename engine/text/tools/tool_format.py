"""ToolFormat: how the chat templates of one family of models have calls written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.text.reply.text_feed import Parser, TextFeed
from engine.text.structured_output import CallForms, Frame, StructuredOutput
from engine.text.tools.call_schema import call_schema
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.tool_spec import ToolRules, ToolSpec

MAX_FORCED_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format. A template is of it that says all of the texts of one entry of `signs`.

    `marks` are the texts that a reader has to see; those in `openings` begin a call wherever they stand.
    `read` parses the content of a reply. `forced` makes the form of a reply of calls and nothing else, where
    such a reply is JSON; else it is written and read as in `forced_as`. `kept` are the forms of calls amid
    text, or None where they cannot be told from it. `shown_id` is how the templates want the id of a call;
    `id_of` makes one of the tool's name and the call's place in the conversation, for templates that show the
    id alone. `names_results`: the templates refuse a result without its tool's name. `shows_one`: of the
    calls of one message they show the first alone.
    """

    signs: tuple[tuple[str, ...], ...]
    openings: tuple[str, ...]
    marks: tuple[str, ...]
    read: Callable[[TextFeed, CallTeller], Parser]
    forced: Callable[[ToolRules], StructuredOutput] | None = None
    forced_as: ToolFormat | None = None
    kept: Callable[[Sequence[ToolSpec]], CallForms] | None = None
    shown_id: Callable[[str], str] = str
    id_of: Callable[[str, int], str] | None = None
    names_results: bool = False
    shows_one: bool = False

    @property
    def with_forced(self) -> ToolFormat:
        """The format of replies that have a form: this one or the one that stands in for it."""
        return self if self.forced_as is None else self.forced_as

    def is_of(self, template: str) -> bool:
        """True for a template of this format."""
        return any(all(text in template for text in texts) for texts in self.signs)


def num_forced(rules: ToolRules) -> int:
    """The most calls that a forced reply may hold."""
    return MAX_FORCED_CALLS if rules.takes_several else 1


def forced_objects(rules: ToolRules, arguments_key: str, frame: Frame | None) -> StructuredOutput:
    """A reply of JSON objects, each in its frame of text."""
    schema = call_schema(rules.callable_tools, arguments_key)
    return StructuredOutput("json_schema", json.dumps(schema), frame, "tools")


def forced_list(rules: ToolRules, arguments_key: str, frame: Frame) -> StructuredOutput:
    """A reply of one list of JSON objects in its frame of text."""
    call = call_schema(rules.callable_tools, arguments_key)
    definitions = call.pop("$defs")
    calls = {
        "type": "array",
        "items": call,
        "minItems": 1,
        "maxItems": num_forced(rules),
        "$defs": definitions,
    }
    return StructuredOutput("json_schema", json.dumps(calls), frame, "tools")
