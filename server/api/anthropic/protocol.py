"""The bodies of POST /v1/messages and /v1/messages/count_tokens, with types and bounds.

None always means absent. What only Anthropic could do, such as its own tools, is unknown here, and so
ignored and named like any unknown field.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.api.anthropic.protocol_blocks import MAX_BLOCKS, ContentBlock, TextBlock
from server.api.extra_fields import MAX_DESCRIPTION, ExtraFields
from server.api.openai.protocol import MAX_MESSAGES, ChatCompletionRequest
from server.api.openai.protocol_structure import Schema
from server.api.openai.protocol_tools import MAX_TOOLS, LongName, Parameters
from server.api.openai.protocol_values import BodyPart, Positive, Stop, type_of


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Blocks = Annotated[
    list[ContentBlock],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_as_blocks, str | list[ContentBlock]),
]
System = Annotated[
    list[TextBlock],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_as_blocks, str | list[TextBlock]),
]


class Message(BodyPart):
    """One message. Tools answer in the user's."""

    role: Literal["user", "assistant", "system"]
    """Who speaks. Tools answer as the user."""
    content: Blocks
    """What is said: a text, or blocks."""


class FunctionTool(BodyPart):
    """A tool that the client runs, by its schema."""

    type: Literal["custom"] | None = None
    """`custom`, or nothing."""
    name: LongName
    """The tool's name."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What the tool does; the model reads it."""
    input_schema: Parameters
    """The JSON schema of its arguments, an object."""
    strict: bool | None = None
    """Whether calls that the model makes of its own accord match `input_schema` as forced ones do, and have
    no keys that it does not name."""


class HostedTool(BodyPart):
    """A tool whose schema only Anthropic's models know, or that Anthropic runs."""

    type: Annotated[str, Field(max_length=128)]
    """The tool's type, which the header `x-slipstream-ignored` names."""


def _tool_tag(value: object) -> str:
    return "<custom>" if type_of(value) in (None, "custom") else "<hosted>"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<custom>")] | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool_tag),
]


class ToolChoice(BodyPart):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto` is as the model likes, `any` at least one call, `tool` the one of this name."""
    name: str | None = None
    """One of `tools`, for `tool`."""
    disable_parallel_tool_use: bool | None = None
    """One call at most."""


class Thinking(BodyPart):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """Whether the model thinks before it answers; `adaptive` is as it likes."""
    budget_tokens: Positive | None = None
    """Most tokens to think; then the reasoning is ended."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the thoughts out of the reply."""


class OutputFormat(BodyPart):
    """What the text of the reply must be."""

    type: Literal["json_schema"]
    """Always `json_schema`."""
    json_schema: Schema = Field(None, alias="schema")
    """The JSON schema that the text follows."""


class OutputConfig(BodyPart):
    """Anthropic's `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How long a model thinks first, for templates that know levels."""
    format: OutputFormat | None = None
    """The form of the text. Left out: any text."""


class MessageBody(ExtraFields):
    """What both paths take."""

    model: str | None = None
    """A served model's name, as GET /v1/models lists it. Left out: the model that is served."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation so far; the model writes the next message."""
    system: System | None = None
    """The system prompt: a text, or blocks of text."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The tools that the model may call. Those of Anthropic are skipped and named in the header
    `x-slipstream-ignored`."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls tools. Left out: as it likes."""
    thinking: Thinking | None = None
    """Whether and how long the model thinks. Left out: as its chat template has it."""
    output_config: OutputConfig | None = None
    """The form of the reply, and how long to think."""
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""

    cache_control: Any = None
    """Accepted, without effect: prefixes are found by their content."""
    diagnostics: Any = None
    """Accepted, without effect."""
    inference_geo: Any = None
    """Accepted, without effect."""
    metadata: Any = None
    """Its `user_id` is a tenant in the queue and to `fair` where there is one key."""
    speed: Any = None
    """Accepted, without effect."""
    user_profile_id: Any = None
    """Accepted, without effect."""
    workspace_id: Any = None
    """Accepted, without effect."""

    @property
    def format(self) -> OutputFormat | None:
        """The newer place for it first."""
        newer = None if self.output_config is None else self.output_config.format
        return newer or self.output_format


class CountTokensRequest(MessageBody):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(MessageBody):
    """POST /v1/messages."""

    max_tokens: Positive
    """Most tokens to generate, thoughts included. Where the context ends before, the message does."""
    stop_sequences: Stop | None = None
    """Strings that end the message where they appear. They are not part of it."""
    stream: bool | None = None
    """Send the reply as server-sent events while it is made."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted, without effect: see `priority`."""


class MessagesTurn(ChatCompletionRequest):
    """The chat turn that a message is made of. It ends where the context does, as Anthropic's do."""

    bends_roles: ClassVar[bool] = True
    ends_with_context: ClassVar[bool] = True
