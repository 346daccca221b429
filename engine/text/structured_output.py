"""StructuredOutput: the form that a reply must have, as a request names it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


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
    model likes, and the text that opens the frame stands nowhere else.
    """

    kind: StructureKind
    source: str = ""
    frame: Frame | None = None
    param: str | None = field(default=None, compare=False)
    otherwise: StructuredOutput | None = None
    lead: str = ""
    amid_text: bool = False
