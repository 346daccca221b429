"""grammar_text: any structured output as one Lark grammar, as llguidance reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from engine.text.call_grammar import CallGrammar
from engine.text.closed_schema import VALUE_KEYS
from engine.text.source_limits import check_grammar, check_pattern, check_schema, check_size
from engine.text.structured_output import CallPart, Frame, StructuredOutput

# Without it llguidance spells out long forced texts in advance, at any cost, and allows one spelling only.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# JSON's whitespace, but never so much that a reply is nothing else.
_WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,32}"
# With \u a key could be spelled in two ways, and come twice: only for characters that need it.
_ESCAPES = '"\\bfnrt'
_UPPER = ("maximum", "exclusiveMaximum")
_LEAST_STEP = 1e-9
_MOST_HELD = 1_000_000  # such a step above it is a number of its own
_NEEDS_U = re.compile(r"\\u00[01]")


def grammar_text(structure: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """The grammar. `special_tokens` are known by their text where a frame spells them.

    Raises ValueError, with a reason to show, for a source that is too large or not valid.
    """
    if structure.kind == "grammar":
        check_size(structure.source)
        if structure.lead or structure.otherwise is not None:
            raise ValueError("a grammar stands alone")
        return _OPTIONS + _lark(structure.source)
    if structure.calls is not None:
        return _calls(structure, special_tokens)
    if structure.amid_text and structure.frame is not None:
        return _amid_text(structure, structure.frame, special_tokens)
    forms = [structure] if structure.otherwise is None else [structure, structure.otherwise]
    names = [f"form{index}" for index in range(len(forms))]
    rules = [_rules(name, form, special_tokens) for name, form in zip(names, forms, strict=True)]
    lead = _literal(structure.lead, special_tokens)
    return "\n".join((f"{_OPTIONS}start: {lead} ({' | '.join(names)})", *rules))


def _amid_text(form: StructuredOutput, frame: Frame, special_tokens: Mapping[str, int]) -> str:
    """Free text in which the frame's opening is always followed by what the frame is about."""
    check_size(form.source)
    opening, closing = (_literal(text.strip(), special_tokens) for text in (frame.before, frame.after))
    # A lazy lexeme ends with the opening's first appearance; a special token is never part of text.
    if frame.before.strip() in special_tokens:
        head = f"head: TEXT {opening}"
    else:
        head = f"head[lazy]: TEXT {opening}"
    lead = _literal(form.lead, special_tokens)
    part = f"part: head SPACE value SPACE {closing}" if closing else "part: head SPACE value"
    value = _value(_schema(form.source))
    text = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,2}/"
    return f"{_OPTIONS}start: {lead} part* TEXT\n{part}\n{head}\nvalue: {value}\n{text}"


def _calls(form: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Calls, whatever they are written in, amid free text or alone."""
    assert form.calls is not None

    def literal(text: str) -> str:
        return _literal(text, special_tokens)

    def value(name: str, part: CallPart) -> str:
        assert isinstance(part, StructuredOutput)
        if part.kind != "grammar":
            return _rules(name, part, special_tokens)
        check_size(part.source)
        return f"{name}: %lark {{\n{_lark(part.source)}\n}}"

    grammar = CallGrammar(form.calls, list(special_tokens), literal, value)
    return _OPTIONS + grammar.text(literal(form.lead))


def _rules(name: str, form: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """The rules of one form; the first is `name`."""
    check_size(form.source)
    match form.kind:
        case "json_object":
            return _json(name, {"type": "object"}, form.frame, special_tokens)
        case "json_schema":
            return _json(name, _schema(form.source), form.frame, special_tokens)
        case "regex":
            return _regex(name, form.source)
        case "choice":
            return _choice(name, form.source)
        case "grammar" | "calls":
            raise ValueError("a grammar stands alone: no tool may be called beside it")


def _json(
    name: str, schema: dict[str, object], frame: Frame | None, special_tokens: Mapping[str, int]
) -> str:
    value = _value(schema)
    if frame is None:
        return f"{name}: {value}"
    before, after, between = (
        _literal(text, special_tokens) for text in (frame.before, frame.after, frame.between)
    )
    more = f"({between} {name}_part){{0,{frame.most - 1}}}" if frame.most > 1 else ""
    part = f"{name}_part: {before} {name}_value {after}"
    return f"{name}: {name}_part {more}\n{part}\n{name}_value: {value}"


def _value(schema: dict[str, object]) -> str:
    """The terminal of JSON of this schema."""
    escapes = _ESCAPES + "u" * bool(_NEEDS_U.search(json.dumps(schema)))
    options = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": escapes}
    return "%json " + json.dumps({**_held_bounds(schema), "x-guidance": options})


def _held_bounds(value: Any) -> Any:
    """The same schema, with what llguidance lets through where only a fraction may follow a whole number.

    Of numbers above 0 and up to 0.5 it takes 0 as well: there they begin the least bit above.
    """
    if isinstance(value, list):
        return [_held_bounds(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: each if key in VALUE_KEYS else _held_bounds(each) for key, each in value.items()}
    least, own = found.get("exclusiveMinimum"), found.get("minimum", 0)
    most = min((found[key] for key in _UPPER if _is_number(found.get(key))), default=math.inf)
    if not _is_number(least) or not _is_number(own) or not 0 <= least < _MOST_HELD:
        return found
    if least == int(least) and least < most < least + 1:
        del found["exclusiveMinimum"]
        found["minimum"] = max(own, least + min(_LEAST_STEP, (most - least) / 2))
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """The terminals that spell this text, special tokens as themselves; none for no text."""
    names = sorted(filter(None, special_tokens), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else f"/{_escaped(piece)}/"
        for piece in pieces
        if piece
    )


def _schema(source: str) -> dict[str, object]:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise ValueError("the schema is not valid JSON") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    check_schema(schema)
    return schema


def _regex(name: str, source: str) -> str:
    from llguidance import LLMatcher

    check_pattern(source)
    grammar = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
    return name + str(grammar).removeprefix("start")


def _choice(name: str, source: str) -> str:
    choices = json.loads(source)
    terminal = f"{name.upper()}_CHOICE"
    return f"{name}: {terminal}\n{terminal}: /{'|'.join(map(_escaped, choices))}/"


def _escaped(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _lark(source: str) -> str:
    if "%llguidance" in source:
        raise ValueError("'%llguidance' is not supported in a grammar")
    check_grammar(source)
    if "::=" not in source:
        return source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        text = str(gbnf_to_lark(source))
    except Exception as error:  # the converter raises anything for what it cannot read
        raise ValueError(f"the grammar is not valid EBNF: {error}") from None
    return text.replace("%llguidance {}", "", 1)
