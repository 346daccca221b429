"""The bodies of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from server.api.openai.protocol import MAX_MESSAGES, ChatMessage
from server.api.openai.protocol_tools import Tools
from server.api.openai.protocol_values import TokenIds, refuse


def check_text(value: object) -> str:
    """One text; a list of prompts is for the endpoints that generate."""
    if not isinstance(value, str):
        refuse("must be a string")
    return value


Text = Annotated[str, PlainValidator(check_text, str)]


class TokenBody(BaseModel):
    """What both take. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class TokenizeRequest(TokenBody):
    """POST /tokenize: a text, or messages as the chat template shows them to the model."""

    prompt: Text | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(TokenBody):
    """POST /detokenize."""

    tokens: TokenIds
