"""How large a reply may become: reckoned before any token of it is computed, and refused there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.api.openai.protocol import CompletionRequest, GenerationBody
from server.http.errors import invalid

MAX_REPLY_BYTES = 64 * 2**20

SCORE_BYTES = 80  # of JSON, for a token with its log-probability, rank and text
HELD_SCORE_BYTES = 136  # of memory, for the same while the reply is being generated
_ID_BYTES = 8
_ORIGIN_BYTES = 9
_ASCII_BYTES, _OTHER_BYTES = 6, 12  # of JSON, for a character that is escaped


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What the choices of one prompt make: how many they are, and the most tokens that each generates."""

    num_prompt_tokens: int
    prompt_text: str | None
    num_choices: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ReplySize:
    """The most a reply may come to: bytes of JSON by the field that asks for them, and records held for it.

    Plain text is not counted: no field multiplies it.
    """

    by_field: dict[str, int]
    num_held_scores: int

    @property
    def num_bytes(self) -> int:
        """Of JSON, all of it."""
        return sum(self.by_field.values())

    @property
    def held_bytes(self) -> int:
        """Of memory that log-probabilities take while the request lives."""
        return self.num_held_scores * HELD_SCORE_BYTES


def reply_size(body: GenerationBody, parts: Iterable[ReplyPart]) -> ReplySize:
    """What the reply to `body` may come to; each of its prompts is one part."""
    scores, top = body.prompt_logprobs, body.num_logprobs
    echoes = isinstance(body, CompletionRequest) and bool(body.echo)
    tells_once = not isinstance(body, CompletionRequest) and not body.stream  # of the prompt
    by_field = dict.fromkeys(("prompt_logprobs", body.logprobs_param, "echo"), 0)
    by_field |= {"return_token_ids": 0, "return_token_origins": 0}
    num_held = 0
    for part in parts:
        num_told = 1 if tells_once else part.num_choices
        generated = part.num_choices * part.max_tokens
        if scores is not None:
            by_field["prompt_logprobs"] += num_told * part.num_prompt_tokens * (scores + 1) * SCORE_BYTES
        if body.num_prompt_logprobs is not None:
            num_held += part.num_prompt_tokens * (body.num_prompt_logprobs + 1)
        if top is not None:
            positions = generated + (part.num_choices * part.num_prompt_tokens if echoes else 0)
            by_field[body.logprobs_param] += positions * (top + 2) * SCORE_BYTES
            num_held += generated * (top + 1)
        if echoes and part.prompt_text is not None:
            by_field["echo"] += part.num_choices * _text_bytes(part.prompt_text)
        if body.return_token_ids:
            by_field["return_token_ids"] += (num_told * part.num_prompt_tokens + generated) * _ID_BYTES
        if body.return_token_origins:
            by_field["return_token_origins"] += generated * _ORIGIN_BYTES
    return ReplySize(by_field, num_held)


def _text_bytes(text: str) -> int:
    return len(text) * (_ASCII_BYTES if text.isascii() else _OTHER_BYTES)


def check_reply_size(size: ReplySize, limit: int = MAX_REPLY_BYTES) -> None:
    """Raise ApiError, a 400 that names the limit and the field that asks for most, for a larger size."""
    if size.num_bytes <= limit:
        return
    by_field = size.by_field
    most = max(by_field, key=by_field.__getitem__)
    raise invalid(
        f"The reply could take {size.num_bytes} bytes, choices by positions by alternatives; the limit is "
        f"{limit}. '{most}' asks for {by_field[most]} of them: lower it, 'n' or 'max_tokens'.",
        most,
    )
