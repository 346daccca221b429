"""The bodies of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, PlainValidator

from server.api.openai.protocol import MAX_MESSAGES, ChatMessage
from server.api.openai.protocol_tools import Tools
from server.api.openai.protocol_values import BodyPart, TemplateOptions, TokenIds, refuse


def check_text(value: object) -> str:
    """One text; a list of prompts is for the endpoints that generate."""
    if not isinstance(value, str):
        refuse("must be a string")
    return value


Text = Annotated[str, PlainValidator(check_text, str)]


class TokenBody(BodyPart):
    """What both take. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    """A served model's name, as GET /v1/models lists it. Left out: the model that is served."""


class TokenizeRequest(TokenBody):
    """POST /tokenize: a text, or messages as the chat template shows them to the model."""

    prompt: Text | None = None
    """The text to tokenize."""
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    """A conversation to tokenize as the chat template shows it, in place of `prompt`."""
    tools: Tools | None = None
    """Tools that the template shows with `messages`."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. Left out: true for `prompt`, false for `messages`."""
    return_token_strs: bool | None = None
    """Send the tokens' own spelling, too."""


class DetokenizeRequest(TokenBody):
    """POST /detokenize."""

    tokens: TokenIds
    """The token ids."""
