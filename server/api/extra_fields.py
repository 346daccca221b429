"""What every API of this server takes beside the fields of its original."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from server.api.openai.protocol import Speculation
from server.api.openai.protocol_values import (
    BodyPart,
    Count,
    Int64,
    Label,
    LogitBias,
    Milliseconds,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Salt,
    Temperature,
    TemplateOptions,
    TopK,
    TopP,
)

MAX_DESCRIPTION = 65_536  # characters, of a tool: agents write manuals


class OwnFields(BodyPart):
    """This server's own, of any request. None always means absent."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    priority: Priority | None = None
    """Lower runs first. Waiting improves it, so that every request runs."""
    request_id: Label | None = None
    """The caller's own name for the request, as in the header `x-request-id`, which wins."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds from arrival within which the reply must end. What cannot be met is refused at once."""
    cache_salt: Salt | None = None
    """Share cached prefixes only with requests that carry the same salt."""
    speculation: Speculation | None = None
    """How to draft for this request. It changes the speed, never the text."""

    def extras(self) -> dict[str, Any]:
        """Those that are set, by the names that OpenAI's bodies have for them, too."""
        return _set_fields(self, OwnFields)


class SamplingFields(OwnFields):
    """Sampling as completions have it and vLLM extends it, too."""

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
    min_tokens: Count | None = None
    """Fewest tokens to generate: no stop and no end of text counts before them."""
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
    ignore_eos: bool | None = None
    """Go on after the model's end-of-text token."""

    def extras(self) -> dict[str, Any]:
        """Those that are set, by the names that OpenAI's bodies have for them, too."""
        return _set_fields(self, SamplingFields)


class ExtraFields(SamplingFields):
    """All that a chat takes, too."""

    chat_template_kwargs: TemplateOptions | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers. Left out: as its chat template has it."""
    thinking_token_budget: Count | None = None
    """Most tokens to think; then the reasoning is ended. Left out: no limit but that of the reply."""

    def extras(self) -> dict[str, Any]:
        """Those that are set, by the names that chat completions have for them, too."""
        return _set_fields(self, ExtraFields)


def _set_fields(body: OwnFields, kind: type[OwnFields]) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in kind.model_fields}
    return {name: value for name, value in values.items() if value is not None}
