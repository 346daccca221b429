"""The kinds of value a request body may hold, each checked strictly and described for the OpenAPI document.

A bool or a string is never a number, and no check reads more of a list than it needs to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine import MAX_PRIORITY, MIN_PRIORITY

MAX_FIELDS = 1024  # of an object: far more than there are
MAX_WHOLE = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_LABEL = 128
TAKEN_OPTIONS = ("messages", "tools", "documents", "add_generation_prompt")
MAX_SALT = 1024
MAX_SCHEMA_CHARS = 65_536
MAX_TOKEN_IDS = 2**20  # more than any vocabulary has, or context holds
_SLICE = 50_000
# Penalties multiply and divide logits: beyond these they overflow float32 and mean nothing anyway.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0

PromptItem: TypeAlias = str | list[int]


class BodyPart(BaseModel):
    """An object in a request body: strictly typed. The docstring below a field is its public description.

    A validation's context, where there is one, is called before each part, to let others run.
    """

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    unread: ClassVar[frozenset[str]] = frozenset()  # known fields that are accepted and not read

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, value: object, info: ValidationInfo) -> object:
        """Each field that is not known costs a finding, and all of them are made in one run."""
        if info.context is not None:
            info.context()
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            refuse(f"has {len(value)} fields; the limit is {MAX_FIELDS}")
        return value


def refuse(message: str) -> NoReturn:
    """Fail the field being validated with `message`, which must not hold the value."""
    raise PydanticCustomError("bad_value", "{message}", {"message": message})


def check_prompt(value: object) -> list[PromptItem]:
    """A prompt in any of OpenAI's four forms, as a list with one item a prompt."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        refuse("must be a string, a list of token ids, or a list of those, and not empty")
    kinds = set(map(type, value))
    if kinds == {int} and min(value) >= 0:
        return [value]
    if kinds == {str}:
        return list(value)
    if kinds == {list} and all(_is_token_ids(item) for item in value):
        return list(value)
    refuse("must hold strings only, token ids only, or lists of token ids only, none of them empty")


def _is_token_ids(item: list[object]) -> bool:
    return set(map(type, item)) == {int} and min(item) >= 0  # type: ignore[type-var, operator]


def check_stop(value: object) -> tuple[str, ...]:
    """Stop strings, one or several, none of them empty or long."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or set(map(type, stops)) - {str}:
        refuse("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        refuse(f"has {len(stops)} strings; the limit is {MAX_STOPS}")
    if any(not 0 < len(stop.encode("utf-8", "replace")) <= MAX_STOP_BYTES for stop in stops):
        refuse(f"must hold strings of 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def check_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Token ids, which JSON spells as strings, with the bias of each."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        refuse(f"must be an object of at most {MAX_LOGIT_BIASES} token ids")
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in value):
        refuse("must have token ids as keys, such as '42'")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        refuse("must have numbers from -100 to 100 as values")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def check_words(value: object) -> tuple[str, ...]:
    """Words that must not be generated: strings with more than spaces in them, none of them long."""
    if not isinstance(value, list) or set(map(type, value)) - {str}:
        refuse("must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        refuse(f"has {len(value)} strings; the limit is {MAX_BAD_WORDS}")
    if any(not word.strip() or len(word.encode("utf-8", "replace")) > MAX_STOP_BYTES for word in value):
        refuse(f"must hold words, of {MAX_STOP_BYTES} bytes at most")
    return tuple(value)


def check_priority(value: int) -> int:
    """A place on the scheduler's scale."""
    if not MIN_PRIORITY <= value <= MAX_PRIORITY:
        refuse(f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}")
    return value


def check_label(value: str) -> str:
    """A name that can be a header's value and a word in a log line."""
    if not (value.isascii() and value.isprintable()):
        refuse("must have printable ASCII characters only")
    return value


def check_many_ids(value: object, check: Callable[[object], list[int]]) -> list[int]:
    """Token ids, a slice at a time: `check` holds the interpreter for as long as a whole list takes.

    It is left to refuse what is wrong, or too much.
    """
    if not isinstance(value, list) or not _SLICE < len(value) <= MAX_TOKEN_IDS:
        return check(value)
    for first in range(0, len(value), _SLICE):
        part = value[first : first + _SLICE]
        if set(map(type, part)) != {int} or min(part) < 0 or max(part) > MAX_WHOLE:
            return check(value)
    return value


def check_content(value: object) -> str | None:
    """The text of a chat message: a string, or text parts, which are joined by newlines (vLLM's way)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("must be a string or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def check_predicted_text(value: object) -> str:
    """The text of a prediction: a string, or text parts that follow each other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("must be a string or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        refuse(
            "must hold text parts only, such as {'type': 'text', 'text': '...'}: the model reads only text"
        )
    return text


def check_template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Variables for the chat template, none of them one that other fields of the request stand for."""
    check_num_values(options)
    taken = next((name for name in options if name in TAKEN_OPTIONS), None)
    if taken is not None:
        refuse(f"must not hold '{taken}', which the request says elsewhere")
    if not all(name.isidentifier() and len(name) <= MAX_LABEL for name in options):
        refuse("must have names of variables as keys")
    return options


def type_of(value: object) -> str | None:
    """What a JSON object, or a record made of one, says that it is; None for anything else."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def check_num_values(schema: object) -> None:
    """Refuse a schema of more values than the text of the longest one could hold, without writing it out."""
    num_values, pending = 1, [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_SCHEMA_CHARS:
                refuse(f"has more than {MAX_SCHEMA_CHARS} characters")
            pending += value.values() if isinstance(value, dict) else value


def depths_of(value: object) -> Iterator[int]:
    """How deep each value inside lies; no recursion."""
    pending = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        yield depth
        if isinstance(value, dict):
            pending += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            pending += [(each, depth + 1) for each in value]


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}]
}
_WORDS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": r"\S", "maxLength": MAX_STOP_BYTES},
    "maxItems": MAX_BAD_WORDS,
}
_LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIASES,
}
_TEXT_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "text", "description": "Always `text`."},
        "text": {"type": "string", "description": "The part's text."},
    },
    "required": ["type", "text"],
}
_PREDICTED_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
_CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [*_PREDICTED_SCHEMA["anyOf"], {"type": "null"}]}


_PRIORITY_SCHEMA: dict[str, Any] = {"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}


def _described(schema: dict[str, Any]) -> Any:
    """Have the OpenAPI document show `schema` where a validator of our own decides."""
    return Field(json_schema_extra=lambda found: found.update(schema))


Prompt = Annotated[list[PromptItem], PlainValidator(check_prompt, Any), _described(_PROMPT_SCHEMA)]
Stop = Annotated[tuple[str, ...], PlainValidator(check_stop, Any), _described(_STOP_SCHEMA)]
Words = Annotated[tuple[str, ...], PlainValidator(check_words, Any), _described(_WORDS_SCHEMA)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(check_logit_bias, Any), _described(_LOGIT_BIAS_SCHEMA)
]
Content = Annotated[str | None, PlainValidator(check_content, Any), _described(_CONTENT_SCHEMA)]
PredictedText = Annotated[str, PlainValidator(check_predicted_text, Any), _described(_PREDICTED_SCHEMA)]

Count = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Positive = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
Int64 = Annotated[int, Field(ge=-(2**63), le=MAX_INT64)]
TokenIds = Annotated[
    list[Count], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), WrapValidator(check_many_ids)
]
Priority = Annotated[int, AfterValidator(check_priority), _described(_PRIORITY_SCHEMA)]
TokenIdSet = Annotated[TokenIds, AfterValidator(lambda token_ids: sorted(set(token_ids)))]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MAX_WHOLE)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
Milliseconds = Annotated[float, Field(gt=0, le=MAX_WHOLE)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
Truncation = Annotated[int, Field(ge=-1, le=MAX_WHOLE)]
Label = Annotated[
    str,
    Field(min_length=1, max_length=MAX_LABEL),
    AfterValidator(check_label),
    _described({"pattern": "^[ -~]+$"}),
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(check_template_options)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Verbosity = Literal["low", "medium", "high"]
