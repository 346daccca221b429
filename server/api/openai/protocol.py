"""The bodies of /v1/completions and /v1/chat/completions: every field of the contract, with type and bounds.

None always means absent, so that a client may spell out its defaults. Fields typed `Any` are refused by name
in `protocol_refusals` (all but their harmless values) or accepted and ignored as OpenAI does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from server.api.openai.protocol_structure import ResponseFormat, StructuredOutputs
from server.api.openai.protocol_tools import CalledFunction, Choice, FunctionCall, Functions, ToolCalls, Tools
from server.api.openai.protocol_values import (
    BodyPart,
    Content,
    Count,
    Effort,
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
    TemplateOptions,
    TokenIdSet,
    TopK,
    TopP,
    Truncation,
    Verbosity,
    Words,
)

DEFAULT_COMPLETION_TOKENS = 16
MAX_MESSAGES = 8192
_MAX_KEPT_CHARS = 128


class StreamOptions(BodyPart):
    """What a stream carries beside text. OpenAI's `include_obfuscation` is accepted and has no effect."""

    unread: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    """Add a last chunk without choices that carries `usage` and `metrics`."""
    continuous_usage_stats: bool | None = None
    """Put the usage so far into every chunk (vLLM's field)."""


class Speculation(BodyPart):
    """How a request is drafted for, within what the server has; it changes the speed, never the text."""

    method: Label | None = None
    """Who drafts: `auto`, `none`, or one of the methods that this server has."""
    num_tokens: Positive | None = None
    """Most tokens to draft for a step, up to the server's limit. Left out: as many as pay."""
    enabled: bool | None = None
    """False decodes without drafts. The text is the same, only slower."""
    length_policy: Literal["fixed", "threshold", "goodput"] | None = None
    """How the length of drafts is chosen. Left out: as the server does it."""


class Prediction(BodyPart):
    """OpenAI's predicted output: text that the reply will probably repeat, to draft from."""

    type: Literal["content"]
    """Always `content`."""
    content: PredictedText
    """The predicted text: a string, or text parts that follow each other."""


class GenerationBody(BodyPart):
    """What both endpoints take. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    prompt_param: ClassVar[str]
    ends_with_context: ClassVar[bool] = False  # more tokens than the context leaves are cut, not refused

    model: str | None = None
    """A served model's name, as GET /v1/models lists it. Left out: the model that is served."""
    max_tokens: Count | None = None
    """Most tokens to generate. Left out: 16."""
    min_tokens: Count | None = None
    """Fewest tokens to generate: no stop and no end of text counts before them."""
    temperature: Temperature | None = None
    """How random the draw is: 0 takes the likeliest token each time, 1 draws by the model's own
    probabilities. Left out: as the model's makers advise (`default_sampling` of GET /server_info), else 1."""
    top_p: TopP | None = None
    """Draw only from the likeliest tokens that together reach this probability. 1 is off.
    Left out: as the model's makers advise, else 1."""
    top_k: TopK | None = None
    """Draw only from this many of the likeliest tokens. 0 and -1 are off.
    Left out: as the model's makers advise, else 0."""
    min_p: MinP | None = None
    """Draw only tokens with at least this share of the likeliest token's probability. 0 is off.
    Left out: as the model's makers advise, else 0."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of every token that the output already has. 0 is off."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once for each time that the output already has it. 0 is off."""
    repetition_penalty: RepetitionPenalty | None = None
    """Above 1 makes every token that prompt or output already has less likely, below 1 likelier. 1 is off.
    Left out: as the model's makers advise, else 1."""
    seed: Int64 | None = None
    """The same request with the same seed gets the same text, alone or in a crowd. Left out, or -1: a fresh
    one."""
    logit_bias: LogitBias | None = None
    """Token ids, written as strings, with a number from -100 to 100 that is added to the token's logit."""
    allowed_token_ids: TokenIdSet | None = None
    """Draw only these tokens."""
    n: Positive | None = None
    """Replies to each prompt, up to `--max-n`. Choice j draws with a seed made from `seed` and j."""
    stop: Stop | None = None
    """One string or several that end the reply where they appear. They are not part of its text."""
    stop_token_ids: TokenIdSet | None = None
    """Tokens that end the reply."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-text token."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string that ended the reply in its text."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Left out: true."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the prompt. Left out: true for a text; false for a chat, whose
    template has them."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep only this many of the prompt's last tokens; -1 keeps what fits the context."""
    return_token_ids: bool | None = None
    """Send the token ids of prompt and output, too."""
    return_token_origins: bool | None = None
    """Say of each token of the output where it comes from, in the order of `token_ids`: `token_origins` holds
    `draft` for an accepted draft and `target` for a token that the model itself drew."""
    return_tokens_as_token_ids: bool | None = None
    """Spell the tokens of log-probabilities as `token_id:N` in place of text."""
    prompt_logprobs: Count | None = None
    """Log-probabilities of the prompt's tokens, with this many of the likeliest at each place."""
    bad_words: Words | None = None
    """Words that the reply must not contain."""
    stream: bool | None = None
    """Send the reply as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """What a stream carries beside text. Without `stream` it has no effect."""
    priority: Priority | None = None
    """Lower runs first. Waiting improves it, so that every request runs. It wins over `service_tier`."""
    service_tier: ServiceTier | None = None
    """OpenAI's name for a priority: `priority` and `fast` are -10, `flex` is 10, the others 0."""
    request_id: Label | None = None
    """The caller's own name for the request, as in the header `x-request-id`, which wins."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from arrival within which the reply must end. What cannot be met is refused at once. The
    header `x-request-deadline-ms` is its twin: the sooner counts."""
    cache_salt: Salt | None = None
    """Share cached prefixes only with requests that carry the same salt."""
    speculation: Speculation | None = None
    """How to draft for this request. It changes the speed, never the text."""
    prediction: Prediction | None = None
    """Text that the reply probably repeats, to draft from (OpenAI's predicted output)."""
    response_format: ResponseFormat | None = None
    """The form of the reply: any text, a JSON object, or JSON that follows a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the reply in vLLM's words: a schema, a regular expression, choices or a grammar."""

    user: Any = None
    """OpenAI's label for the end user, a tenant in the queue and to `fair` where there is one key."""
    metadata: Any = None
    """OpenAI's labels for stored replies. Accepted, without effect."""
    store: Any = None
    """Whether OpenAI keeps the reply. Accepted, without effect: nothing is kept."""
    safety_identifier: Any = None
    """OpenAI's label for the end user, a tenant in the queue and to `fair` where there is one key."""
    prompt_cache_key: Any = None
    """OpenAI's hint for its prompt cache. Accepted, without effect: prefixes are found by their content."""
    prompt_cache_options: Any = None
    """OpenAI's options of its prompt cache. Accepted, without effect."""
    prompt_cache_retention: Any = None
    """How long OpenAI caches a prompt. Accepted, without effect."""

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


class SpeculationPatch(Speculation):
    """How a live request is drafted for from its next step on; what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")


class RequestPatch(BodyPart):
    """PATCH /v1/requests/{id}: what may change while a request lives; None leaves it as it is."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    priority: Priority | None = None
    """The new priority; lower runs first. Left out: as it is."""
    deadline_ms: Milliseconds | None = None
    """The new deadline in milliseconds from the request's arrival. Left out: as it is."""
    speculation: SpeculationPatch | None = None
    """How it is drafted for from the next step on; no token changes. Left out: as it is."""


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt_param: ClassVar[str] = "prompt"

    prompt: Prompt
    """The text to continue, or its token ids; or a list of several of either."""
    best_of: Positive | None = None
    """Supported only when equal to `n`."""
    echo: bool | None = None
    """Begin the reply's text with the prompt."""
    logprobs: Count | None = None
    """Log-probabilities of the tokens drawn, with this many of the likeliest at each place, up to
    `--max-logprobs`."""
    suffix: str | None = None
    """Text that follows: the reply is what stands between the prompt and it. For models that fill in the
    middle."""

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


class OpenEndedCompletion(CompletionRequest):
    """A completion that goes on for as long as the context has room, as other APIs have it."""

    ends_with_context: ClassVar[bool] = True

    @property
    def tokens_asked(self) -> int | None:
        """None is whatever the context leaves."""
        return self.max_tokens


class ChatMessage(BodyPart):
    """One message of a conversation; what clients send back of our own replies is accepted and not read."""

    unread: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations", "audio", "parsed"})

    role: Role
    """Who speaks. `developer` is another name for `system`; `tool` brings the result of a call, `function`
    that of the older kind."""
    content: Content = None
    """The text: a string, or text parts, which are joined by newlines. Only an assistant's may be missing."""
    name: str | None = None
    """The speaker's name, for templates that show it."""
    tool_call_id: str | None = None
    """The id of the call that a message with role `tool` answers."""
    tool_calls: ToolCalls | None = None
    """The calls that an assistant's earlier message made."""
    function_call: CalledFunction | None = None
    """The same, of the older kind: one, without an id."""
    reasoning_content: str | None = None
    """What the assistant thought before its earlier message, for templates that show it."""
    reasoning: str | None = None
    """Another name for `reasoning_content`."""

    @property
    def thought(self) -> str | None:
        """The reasoning of an earlier reply, by either of its names."""
        return self.reasoning_content or self.reasoning


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"
    bends_roles: ClassVar[bool] = False  # see ChatInput.bends

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation so far; the model writes the next message."""
    max_tokens: Positive | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Positive | None = None
    """Most tokens to generate. Left out: as many as the context leaves."""
    logprobs: bool | None = None
    """Send the log-probability of each token drawn."""
    top_logprobs: Count | None = None
    """Send this many of the likeliest tokens at each place, up to `--max-logprobs`. It needs `logprobs`."""

    audio: Any = None
    """Options of spoken replies. Not supported."""
    modalities: Any = None
    """Kinds of reply. Only `["text"]` is supported."""
    parallel_tool_calls: bool | None = None
    """Whether one reply may make several calls. Left out: true."""
    reasoning_effort: Effort | None = None
    """How long a model thinks first, for templates that know levels; `none` is `enable_thinking` false."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers. Left out: as its chat template has it."""
    thinking_token_budget: Count | None = None
    """Most tokens to think; then the reasoning is ended. Left out: no limit but that of the reply."""
    tool_choice: Choice | None = None
    """Whether the model calls tools: `none`, `auto` (as it likes), `required` (at least one), one by name, or
    some that alone may be called. Left out: `auto` with tools."""
    tools: Tools | None = None
    """The functions, and the tools that take text, that the model may call."""
    functions: Functions | None = None
    """The older name of `tools`: functions alone."""
    function_call: FunctionCall | None = None
    """The older name of `tool_choice`: `none`, `auto`, or one of `functions` by name."""
    verbosity: Verbosity | None = None
    """How much a model writes, for templates that read `verbosity`."""
    web_search_options: Any = None
    """Options of OpenAI's web search. Not supported."""

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
