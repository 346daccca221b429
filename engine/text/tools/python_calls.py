"""Calls as a list of Python calls with arguments by name: LFM2, llama 4, gemma 3."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from keyword import iskeyword

from engine.text.reply.text_feed import Parser, TextFeed
from engine.text.structured_output import CallForm, CallForms, CallPart, Repeated
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_calls import JsonMarks, read_json_calls
from engine.text.tools.kept_calls import SPACE, grammar_of, json_value, named_objects, property_schemas
from engine.text.tools.tool_spec import ToolSpec

_MAX_CHARS = 65_536
_MAX_HEAD = 256
_HEAD = re.compile(r"\A\[?\s*[A-Za-z_][\w.]*\s*\(")
_PART_OF_HEAD = re.compile(r"\A\[?\s*(?:[A-Za-z_][\w.]*\s*)?")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class PythonMarks:
    """How calls stand in text: one of `openings`, a list of calls or one call, then one of `closings`.

    `bare` calls need no opening where the reply begins. JSON objects between the marks are read as well.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    bare: bool = False


def kept_python(marks: PythonMarks, tools: Sequence[ToolSpec]) -> CallForms:
    """The calls as grammars hold them: in Python where its words allow it, else as JSON objects."""
    in_python = [tool for tool in tools if _is_python(tool)]
    rest = [tool for tool in tools if tool not in in_python]
    calls = tuple(_kept_call(tool) for tool in in_python)
    more = Repeated(tuple((", ", *call) for call in calls), None)
    closing = marks.closings[0]
    forms = list(named_objects(rest, marks.openings, "arguments", closing).forms)
    for call in calls:
        group = ("[", *call, more, "]")
        forms += [CallForm(opening, (SPACE, *group, SPACE, closing)) for opening in marks.openings]
        forms += [CallForm("", group)] * marks.bare
    names = "|".join(re.escape(tool.name) for tool in in_python)
    bare = f"\\s*\\[?\\s*({names})\\s*\\(" if marks.bare and calls else ""
    return CallForms(tuple(forms), bare=bare)


def _is_python(tool: ToolSpec) -> bool:
    """True for a tool that Python can call with all its arguments by name."""
    schemas = property_schemas(tool)
    keys = () if schemas is None else schemas
    names = (*tool.name.split("."), *keys)
    is_known = schemas is not None and grammar_of(tool) is None
    return is_known and all(name.isidentifier() and not iskeyword(name) for name in names)


def _kept_call(tool: ToolSpec) -> tuple[CallPart, ...]:
    """`name(key=value, key=value)`, its keys in the order of the schema.

    A comma stands between two arguments: behind those before the first required one, before all others. Where
    none is required, it stands behind each.
    """
    parts: list[CallPart] = []
    has_required = False
    for key, (schema, is_required) in (property_schemas(tool) or {}).items():
        pair = (f"{key}=", json_value(schema))
        if is_required:
            parts += (", ", *pair) if has_required else pair
        else:
            parts.append(Repeated(((", ", *pair) if has_required else (*pair, ", "),)))
        has_required = has_required or is_required
    return (f"{tool.name}(", *parts, ")")


def read_python_calls(marks: PythonMarks, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. A list of calls is told when all of it has come: Python has no half calls."""
    if marks.bare:
        space = yield from feed.skip_space()
        if (yield from _read_list(marks, feed, teller)):
            space = ""
        feed.text = space + feed.text
    while True:
        mark = yield from teller.copy_until(feed, marks.openings)
        if mark is None:
            return
        space = yield from feed.skip_space()
        if (yield from _read_list(marks, feed, teller)):
            continue
        if feed.ended and feed.cut and _may_become_calls(feed.text):
            feed.text = ""
            return
        # JSON, or no call at all, which the other reader tells as it stands.
        rest = JsonMarks(marks.openings, marks.closings)
        feed.text = mark + space + feed.text
        yield from read_json_calls(rest, feed, teller)
        return


def _may_become_calls(text: str) -> bool:
    return _PART_OF_HEAD.fullmatch(text) is not None or _HEAD.match(text) is not None


def _read_list(marks: PythonMarks, feed: TextFeed, teller: CallTeller) -> Parser:
    """The calls and what closes them; False, and nothing used up, where there are none."""
    while _PART_OF_HEAD.fullmatch(feed.text) and len(feed.text) < _MAX_HEAD and not feed.ended:
        yield
    if _HEAD.match(feed.text) is None:
        return False
    end, looked_at = _PythonEnd(), 0
    while (size := end.find(feed.text, looked_at)) is None:
        looked_at = len(feed.text)
        if feed.ended or end.is_broken or looked_at > _MAX_CHARS:
            if feed.ended and feed.cut and marks.bare:
                feed.text = ""
            return False
        yield
    is_too_large = end.is_broken or size > _MAX_CHARS
    calls = None if is_too_large else calls_in(feed.text[:size])
    if calls is None or not all(teller.knows(name) for name, _ in calls):
        return False
    feed.take(size)
    for name, arguments in calls:
        teller.call(name, arguments)
    space = yield from feed.skip_space()
    closing = yield from feed.starts(marks.closings)
    if closing is not None:
        feed.take(len(closing))
    elif feed.ended and feed.cut and any(each.startswith(feed.text) for each in marks.closings):
        feed.text = ""
    else:
        feed.text = space + feed.text
    return True


class _PythonEnd:
    """Finds where brackets that open with the text close again, each character looked at once."""

    def __init__(self) -> None:
        self.is_broken = False
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str, start: int) -> int | None:
        """Where the outermost bracket closes, None if it does not; `start` is where the last text ended."""
        for at in range(start, len(text)):
            char = text[at]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                if char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
                self.is_broken = self.is_broken or self._depth > 128
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls in Python text; None if it is anything else."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else [body]
        return [_call_of(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call_of(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with arguments by name")
    found = {each.arg: _value_of(each.value) for each in node.keywords if each.arg is not None}
    if len(found) != len(node.keywords):
        raise ValueError("arguments that have no names")
    return ast.unparse(node.func), json.dumps(found, ensure_ascii=False, allow_nan=False)


def _value_of(node: ast.expr) -> object:
    """A literal; models write JSON's words for constants as well."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return [_value_of(each) for each in elts]
        case ast.Dict(keys=keys, values=values):
            return {
                str(ast.literal_eval(key)): _value_of(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)
