"""The body of POST /v1/responses: every field of OpenAI's, with type and bounds, and what is refused by name.

None always means absent. Fields typed `Any` are refused (all but their harmless values) or labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from server.api.extra_fields import ExtraFields
from server.api.openai.protocol import ChatCompletionRequest
from server.api.openai.protocol_refusals import Refusal
from server.api.openai.protocol_structure import Schema
from server.api.openai.protocol_values import BodyPart, Count, Label, Positive, ServiceTier, refuse
from server.api.responses.protocol_items import MAX_ITEMS, InputItem
from server.api.responses.protocol_tools import ToolChoice, Tools

MAX_LABELS = 16
MAX_LABEL_NAME, MAX_LABEL_VALUE = 64, 512

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

_NEVER = "'{}' is not supported."
REFUSALS: Mapping[str, Refusal] = {
    name: Refusal(_NEVER.format(name), harmless)
    for name, harmless in {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    }.items()
}


def check_metadata(value: dict[str, str]) -> dict[str, str]:
    """OpenAI's bounds."""
    if len(value) > MAX_LABELS:
        refuse(f"has {len(value)} keys; the limit is {MAX_LABELS}")
    if any(len(name) > MAX_LABEL_NAME or len(each) > MAX_LABEL_VALUE for name, each in value.items()):
        refuse(f"must have keys of at most {MAX_LABEL_NAME} characters and values of {MAX_LABEL_VALUE}")
    return value


class TextFormat(BodyPart):
    """What the text of the reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is any text, `json_object` any JSON object, `json_schema` JSON that follows a schema."""
    name: Label | None = None
    """A name for the schema. It is not read."""
    description: str | None = None
    """What the schema is for. It is not read."""
    json_schema: Schema = Field(None, alias="schema")
    """The JSON schema that the text follows."""
    strict: bool | None = None
    """Accepted, without effect: the text follows the schema either way."""


class TextOptions(BodyPart):
    """OpenAI's `text`."""

    format: TextFormat | None = None
    """The form of the text. Left out: any text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """How much a model writes. Accepted, without effect."""


class ReasoningOptions(BodyPart):
    """OpenAI's `reasoning`. Thoughts are sent as they are, so a summary of them is never made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How long a model thinks first, for templates that know levels; `none` is not at all."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted, without effect: thoughts are sent as they are."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""


def _as_items(value: object) -> object:
    """A text is a message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[InputItem],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_as_items, str | list[InputItem]),
]
Metadata = Annotated[dict[str, str], AfterValidator(check_metadata)]


class ResponsesRequest(ExtraFields):
    """POST /v1/responses."""

    model: str | None = None
    """A served model's name, as GET /v1/models lists it. Left out: the model that is served."""
    input: Input | None = None
    """The conversation since the previous response: a text of the user, or items."""
    instructions: str | None = None
    """A system message before all others. That of a previous response does not count any more."""
    previous_response_id: Label | None = None
    """The stored response whose conversation goes on."""
    store: bool | None = None
    """Whether the response can be read again and continued. Left out: true, within the limits of the
    server."""
    stream: bool | None = None
    """Send the reply as server-sent events while it is made."""
    max_output_tokens: Positive | None = None
    """Most tokens to generate, thoughts included. Left out: as many as the context leaves."""
    max_tool_calls: Count | None = None
    """Most calls of tools that OpenAI runs. Accepted, without effect: there are none."""
    parallel_tool_calls: bool | None = None
    """Whether one reply may make several calls. Left out: true."""
    tools: Tools | None = None
    """The tools that the model may call. Those that OpenAI runs are skipped and named in the header
    `x-slipstream-ignored`."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls tools: `none`, `auto` (as it likes), `required` (at least one), one tool,
    or some of them."""
    text: TextOptions | None = None
    """The form of the text."""
    reasoning: ReasoningOptions | None = None
    """How the model thinks."""
    include: Annotated[list[str], Field(max_length=MAX_LABELS)] | None = None
    """What the reply holds beside: `message.output_text.logprobs`, `reasoning.encrypted_content`."""
    top_logprobs: Count | None = None
    """The likeliest tokens to show with each log-probability, up to `--max-logprobs`."""
    metadata: Metadata | None = None
    """Labels that the response repeats."""
    service_tier: ServiceTier | None = None
    """OpenAI's name for a priority: `priority` and `fast` are -10, `flex` is 10, the others 0."""

    background: Any = None
    """Answering while nobody waits. Not supported."""
    context_management: Any = None
    """Shortening long conversations. Not supported."""
    conversation: Any = None
    """OpenAI's stored conversations. Not supported: see `previous_response_id`."""
    moderation: Any = None
    """Not supported."""
    prompt: Any = None
    """OpenAI's stored prompts. Not supported."""
    truncation: Any = None
    """What becomes of a conversation that is too long. Only `disabled` is supported: a 400."""

    prompt_cache_key: Any = None
    """OpenAI's hint for its prompt cache. Accepted, without effect: prefixes are found by their content."""
    prompt_cache_options: Any = None
    """OpenAI's options of its prompt cache. Accepted, without effect."""
    prompt_cache_retention: Any = None
    """How long OpenAI caches a prompt. Accepted, without effect."""
    safety_identifier: Any = None
    """OpenAI's label for the end user, a tenant in the queue and to `fair` where there is one key."""
    stream_options: Any = None
    """OpenAI's `include_obfuscation`. Accepted, without effect."""
    user: Any = None
    """OpenAI's label for the end user, a tenant in the queue and to `fair` where there is one key."""

    @property
    def is_stored(self) -> bool:
        """OpenAI stores what nobody asks it not to."""
        return self.store is not False

    @property
    def includes_logprobs(self) -> bool:
        """Whether the text comes with the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def includes_encrypted(self) -> bool:
        """Whether thoughts come in a form that a client without storage can give back."""
        return ENCRYPTED_REASONING in (self.include or ())


class ResponsesTurn(ChatCompletionRequest):
    """The chat turn that a response is made of: errors name the fields of the response."""

    prompt_param: ClassVar[str] = "input"
    bends_roles: ClassVar[bool] = True
