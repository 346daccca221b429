"""StructuredOutput: the form that a reply must have, as a request names it; CallForms: calls amid text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True, slots=True)
class Frame:
    """Literal text around a JSON value: `before`, the value, `after`, from once to `most` times.

    `between` goes between two of them. As tool calls are written in a reply: where a text spells a special
    token of the model, it is that token.
    """

    before: str = ""
    after: str = ""
    between: str = ""
    most: int = 1


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a reply must be.

    `source` is empty for a `json_object` (any JSON object); the text of a JSON schema; a regular expression
    that the whole reply matches; a JSON list of strings, one of which it is; or a grammar, as Lark or as EBNF
    (`root ::= ...`). Only JSON may have a `frame`. `param` names the request's field in refusals.

    `otherwise` is what it may be instead; a reply of either begins with the text `lead`. A grammar has
    neither, and is none of two forms. `amid_text`: framed values stand anywhere in free text, as often as the
    model likes, and the text that opens the frame stands nowhere else. The same of `calls`, which only the
    kind of that name has.
    """

    kind: StructureKind
    source: str = ""
    frame: Frame | None = None
    param: str | None = field(default=None, compare=False)
    otherwise: StructuredOutput | None = None
    lead: str = ""
    amid_text: bool = False
    calls: CallForms | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that a regular expression of this server's own matches."""

    regex: str


@dataclass(frozen=True, slots=True)
class TextUpTo:
    """Any text, and the `closing` that ends it where it first appears."""

    closing: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """One of `options` after another, up to `most` of them (None: any number), or none at all."""

    options: tuple[tuple[CallPart, ...], ...]
    most: int | None = 1


# A text is literal, but for the special tokens that it spells.
CallPart: TypeAlias = str | Pattern | TextUpTo | Repeated | StructuredOutput


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call: `opening`, then `parts`. With `is_last` the reply ends behind it."""

    opening: str
    parts: tuple[CallPart, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class CallForms:
    """The calls that a reply may hold. Each opening stands in the text where a call begins and nowhere else.

    A call whose opening is empty may be what the reply begins with; then no text of the regular expression
    `bare` may be. `skipped` are marks that may stand in the text as well. With `alone` the reply is
    of one to so many calls, and of no text.
    """

    forms: tuple[CallForm, ...]
    skipped: tuple[str, ...] = ()
    bare: str = ""
    alone: int = 0
