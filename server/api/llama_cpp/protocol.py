"""The body of POST /infill, with types and bounds. None always means absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from server.api.extra_fields import SamplingFields
from server.api.openai.protocol import OpenEndedCompletion
from server.api.openai.protocol_values import (
    MAX_LABEL,
    MAX_WHOLE,
    BodyPart,
    RepetitionPenalty,
    Stop,
    check_logit_bias,
    refuse,
)

MAX_FILES = 1024
MAX_FIELD_PATHS = 64


FieldPaths = Annotated[
    list[Annotated[str, Field(max_length=MAX_LABEL)]], Field(max_length=MAX_FIELD_PATHS, fail_fast=True)
]


def check_biases(value: object) -> tuple[tuple[int, float], ...]:
    """llama.cpp's pairs of a token id and a bias, or OpenAI's object."""
    if not isinstance(value, list):
        return check_logit_bias(value)
    if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value):
        refuse("must be pairs of a token id and a bias")
    return check_logit_bias({str(pair[0]): pair[1] for pair in value})


class ExtraFile(BodyPart):
    """Another file, or a piece of one, that the model is shown."""

    filename: str | None = None
    """Its name."""
    text: str
    """What is in it."""


class InfillRequest(SamplingFields):
    """POST /infill."""

    model: str | None = None
    """A served model's name. Left out: the model that is served."""
    input_prefix: str
    """The text before the cursor, up to its line."""
    input_suffix: str
    """The text behind the cursor."""
    prompt: str | None = None
    """The cursor's own line, up to it: it follows `input_prefix`."""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES, fail_fast=True)] | None = None
    """Other files, the most telling one last. What does not fit is left out, from the first on."""
    n_predict: Annotated[int, Field(ge=-2, le=MAX_WHOLE)] | None = None
    """Most tokens to generate. Left out or negative: as many as the context leaves."""
    repeat_penalty: RepetitionPenalty | None = None
    """Another name for `repetition_penalty`, over all of the prompt and the output."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(check_biases, Any)] | None = None
    """Pairs of a token id and a number from -100 to 100 that is added to its logit, or OpenAI's object."""
    stop: Stop | None = None
    """Strings that end the text where they appear. They are not part of it."""
    stream: bool | None = None
    """Send the text as server-sent events while it is made."""
    response_fields: FieldPaths | None = None
    """Fields that the reply has; those of an object inside as `timings/prompt_n`. Left out: all."""
    cache_prompt: Any = None
    """Accepted, without effect: prefixes are found by their content."""


class InfillTurn(OpenEndedCompletion):
    """The completion that it is made of."""

    prompt_param: ClassVar[str] = "input_prefix"
