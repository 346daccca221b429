"""The bodies of POST /api/chat, /api/generate, /api/embed and /api/show, with types and bounds.

None always means absent. What only Ollama's own engine could do, such as `options.num_ctx`, is unknown here,
and so ignored and named like any unknown field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from server.api.embeddings.protocol import Texts, TextsBody
from server.api.extra_fields import OwnFields
from server.api.openai.protocol import MAX_MESSAGES, ChatCompletionRequest, OpenEndedCompletion
from server.api.openai.protocol_refusals import Refusal
from server.api.openai.protocol_structure import check_schema
from server.api.openai.protocol_tokens import Text
from server.api.openai.protocol_tools import MAX_CALLS, Tools
from server.api.openai.protocol_values import (
    MAX_WHOLE,
    BodyPart,
    Int64,
    MinP,
    Penalty,
    Positive,
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_num_values,
    refuse,
)


def _kind_tag(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<other>"


Format = Annotated[
    Annotated[Literal["", "json"], Tag("<word>")]
    | Annotated[dict[str, Any], AfterValidator(check_schema), Tag("<other>")],
    Discriminator(_kind_tag),
]
Think = Annotated[
    Annotated[Literal["low", "medium", "high"], Tag("<word>")] | Annotated[bool, Tag("<other>")],
    Discriminator(_kind_tag),
]


def check_images(images: list[Any]) -> list[Any]:
    """None: the model reads only text."""
    if images:
        refuse("must be empty: the model reads only text")
    return images


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are written out in no time."""
    check_num_values(arguments)
    return arguments


def _never(name: str, *harmless: object, hint: str = "") -> tuple[str, Refusal]:
    return name, Refusal(f"'{name}' is not supported{hint}.", harmless)


ON_OLLAMA: Mapping[str, Refusal] = dict(
    (
        _never("context", [], hint=": send the conversation to /api/chat"),
        _never("logprobs", False, hint=" here: /v1/chat/completions has it"),
        _never("template", "", hint=": the server's own template is used"),
        _never("top_logprobs", 0, hint=" here: /v1/chat/completions has it"),
    )
)


class OllamaOptions(BodyPart):
    """Sampling. What says how Ollama itself loads and runs a model has no effect."""

    temperature: Temperature | None = None
    """How random the draw is; 0 takes the likeliest token each time. Left out, here and below: as the model's
    makers advise."""
    top_k: TopK | None = None
    """Draw only from this many of the likeliest tokens. 0 and -1 are off."""
    top_p: TopP | None = None
    """Draw only from the likeliest tokens that together reach this probability."""
    min_p: MinP | None = None
    """Draw only tokens with at least this share of the likeliest token's probability."""
    num_predict: Annotated[int, Field(ge=-2, le=MAX_WHOLE)] | None = None
    """Most tokens to generate. 0, a negative number or nothing: as many as the context leaves."""
    repeat_penalty: RepetitionPenalty | None = None
    """Above 1 makes every token that prompt or output already has less likely. 1 is off."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of every token that the output already has."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time that the output already has it."""
    seed: Int64 | None = None
    """The same request with the same seed gets the same text. -1 or nothing: a fresh one."""
    stop: Stop | None = None
    """Strings that end the reply where they appear. They are not part of it."""

    def fields(self) -> dict[str, Any]:
        """Those that are set, by the names that OpenAI's bodies have for them."""
        values = {name: getattr(self, name) for name in OllamaOptions.model_fields}
        values["repetition_penalty"] = values.pop("repeat_penalty")
        num_tokens, seed = values.pop("num_predict"), values.pop("seed")
        values["max_tokens"] = num_tokens if num_tokens is not None and num_tokens > 0 else None
        values["seed"] = None if seed == -1 else seed
        return {name: value for name, value in values.items() if value is not None}


class OllamaCalledFunction(BodyPart):
    """What an earlier call named and gave."""

    unread: ClassVar[frozenset[str]] = frozenset({"index"})

    name: str
    """The function's name."""
    arguments: Annotated[dict[str, Any], AfterValidator(check_arguments)]
    """Its arguments."""


class OllamaToolCall(BodyPart):
    """A call that an assistant's earlier message made."""

    unread: ClassVar[frozenset[str]] = frozenset({"type"})

    id: str | None = None
    """The call's id. Left out: its place says which it is."""
    function: OllamaCalledFunction
    """What was called."""


Calls = Annotated[list[OllamaToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]


class OllamaMessage(BodyPart):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    """Who speaks. `tool` brings the result of a call."""
    content: str | None = None
    """The text."""
    thinking: str | None = None
    """What the assistant thought before its earlier message, for templates that show it."""
    images: Annotated[list[Any], AfterValidator(check_images)] | None = None
    """Pictures. Not supported."""
    tool_calls: Calls | None = None
    """The calls that an assistant's earlier message made."""
    tool_name: str | None = None
    """The tool whose result this is. Left out: that of the first call without a result."""
    tool_call_id: str | None = None
    """The id of the call that this answers."""


class OllamaBody(OwnFields):
    """What both generating paths take."""

    model: str | None = None
    """A name that the model is served by, with or without `:latest`. Left out: the model that is served."""
    format: Format | None = None
    """`json` for any JSON object, or the JSON schema that the reply follows."""
    options: OllamaOptions | None = None
    """Sampling, and how long the reply may be."""
    stream: bool | None = None
    """Send the reply in lines of JSON while it is made. Left out: true."""
    think: Think | None = None
    """Whether the model thinks before it answers, or how long. Left out: as its chat template has it."""

    keep_alive: Any = None
    """How long Ollama keeps a model loaded. Accepted, without effect: this one stays."""
    context: Any = None
    """An earlier conversation as tokens. Not supported."""
    logprobs: Any = None
    """Log-probabilities. Not supported here."""
    template: Any = None
    """Another template. Not supported."""
    top_logprobs: Any = None
    """The likeliest tokens at each place. Not supported here."""

    @property
    def streams(self) -> bool:
        """Whether the reply comes in lines."""
        return self.stream is not False


class OllamaChatRequest(OllamaBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """The conversation so far; the model writes the next message. None at all asks whether it is loaded."""
    tools: Tools | None = None
    """The functions that the model may call."""


class OllamaGenerateRequest(OllamaBody):
    """POST /api/generate."""

    prompt: str | None = None
    """What the user says. None at all asks whether the model is loaded."""
    suffix: str | None = None
    """Text that follows: the reply is what stands between the prompt and it. For models that fill in the
    middle."""
    system: str | None = None
    """The system prompt."""
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    images: Annotated[list[Any], AfterValidator(check_images)] | None = None
    """Pictures. Not supported."""


class OllamaEmbedRequest(TextsBody):
    """POST /api/embed: a vector of each text, of length 1."""

    input: Texts
    """What to embed: a text or a list of texts."""
    truncate: bool | None = None
    """Keep of a text what the model can read; false refuses one that is too long. Left out: true."""
    dimensions: Positive | None = None
    """Keep only so many numbers of each vector (Matryoshka models)."""
    options: dict[str, Any] | None = None
    """How Ollama itself runs a model. Accepted, without effect."""
    keep_alive: Any = None
    """How long Ollama keeps a model loaded. Accepted, without effect: this one stays."""


class OllamaEmbeddingsRequest(TextsBody):
    """POST /api/embeddings: the vector of one text, by the older path."""

    prompt: Text
    """What to embed."""
    options: dict[str, Any] | None = None
    """How Ollama itself runs a model. Accepted, without effect."""
    keep_alive: Any = None
    """How long Ollama keeps a model loaded. Accepted, without effect: this one stays."""


class OllamaShowRequest(BodyPart):
    """POST /api/show."""

    unread: ClassVar[frozenset[str]] = frozenset({"verbose"})

    model: str | None = None
    """A name that the model is served by. Left out: the model that is served."""
    name: str | None = None
    """The older name of `model`."""


class OllamaTurn(ChatCompletionRequest):
    """The chat turn that a request is made into. It ends where the context does."""

    bends_roles: ClassVar[bool] = True
    ends_with_context: ClassVar[bool] = True


class OllamaText(OpenEndedCompletion):
    """The completion that a request without a chat is made into."""
