"""The bodies of /v1/completions and /v1/chat/completions: every field of the contract, with type and bounds.

None always means absent, so that a client may spell out its defaults. Fields typed `Any` are refused by name
in `protocol_refusals` (all but their harmless values) or accepted and ignored as OpenAI does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.api.openai.protocol_structure import ResponseFormat, StructuredOutputs
from server.api.openai.protocol_tools import Choice, ToolCalls, Tools
from server.api.openai.protocol_values import (
    Content,
    Count,
    Int64,
    Label,
    LogitBias,
    Milliseconds,
    MinP,
    Penalty,
    Positive,
    PredictedText,
    Priority,
    Prompt,
    RepetitionPenalty,
    Role,
    Salt,
    ServiceTier,
    Stop,
    Temperature,
    TokenIdSet,
    TopK,
    TopP,
    Truncation,
    Words,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_MESSAGES = 8192
_MAX_KEPT_CHARS = 128


class StreamOptions(BaseModel):
    """What a stream carries beside text. OpenAI's `include_obfuscation` is accepted and has no effect."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(BaseModel):
    """How a request is drafted for, within what the server has; it changes the speed, never the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Label | None = None
    num_tokens: Positive | None = None
    enabled: bool | None = None


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the reply will probably repeat, to draft from."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"]
    content: PredictedText


class GenerationBody(BaseModel):
    """What both endpoints take. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    prompt_param: ClassVar[str]

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Int64 | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIdSet | None = None
    n: Positive | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIdSet | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Count | None = None
    bad_words: Words | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    service_tier: ServiceTier | None = None
    request_id: Label | None = None
    deadline_ms: Milliseconds | None = None
    cache_salt: Salt | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    def forget_input(self) -> None:
        """Let go of everything that may be large, once it has been read: a reply needs none of it.

        Only numbers, switches and short words stay.
        """
        for name, value in self.__dict__.items():
            is_short = isinstance(value, str) and len(value) <= _MAX_KEPT_CHARS
            if not is_short and not isinstance(value, bool | int | float):
                self.__dict__[name] = None
        if self.__pydantic_extra__:
            self.__pydantic_extra__.clear()

    @property
    def num_choices(self) -> int:
        """Choices a prompt gets."""
        return self.n or 1

    @property
    def tokens_asked(self) -> int | None:
        """Most tokens to generate; None is whatever the context leaves."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report at each position beside the sampled one; None reports nothing."""
        raise NotImplementedError

    @property
    def logprobs_param(self) -> str:
        """The field that says how many."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens, as many as anything in the reply shows."""
        return self.prompt_logprobs


class RequestPatch(BaseModel):
    """PATCH /v1/requests/{id}: what may change while a request lives; None leaves it as it is."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    priority: Priority | None = None
    deadline_ms: Milliseconds | None = None


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt_param: ClassVar[str] = "prompt"

    prompt: Prompt
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    suffix: Any = None

    @property
    def tokens_asked(self) -> int | None:
        """OpenAI's small default, not the whole context."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def logprobs_param(self) -> str:
        """One field says both whether and how many."""
        return "logprobs"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt carries log-probabilities like the output."""
        echoed = self.logprobs if self.echo else None
        asked = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return max(asked, default=None)


class ChatMessage(BaseModel):
    """One message of a conversation; what clients send back of our own replies is accepted and not read."""

    model_config = ConfigDict(strict=True)

    role: Role
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: ToolCalls | None = None


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    audio: Any = None
    modalities: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Any = None
    tool_choice: Choice | None = None
    tools: Tools | None = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def tokens_asked(self) -> int | None:
        """The newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """None unless `logprobs` is true; `top_logprobs` may be left out."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_param(self) -> str:
        """The field that says how many."""
        return "top_logprobs"
