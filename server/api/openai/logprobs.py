"""Log-probabilities in the shapes that OpenAI and vLLM have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import Engine, TokenLogprobs
from server.api.openai.protocol import GenerationBody

# JSON has no infinity; vLLM's stand-in for a token that cannot be drawn.
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a reply spells single tokens: as text, or, as vLLM offers, by id."""

    text: Callable[[int], str]
    bytes: Callable[[int], bytes | None]

    @classmethod
    def of(cls, engine: Engine, body: GenerationBody) -> TokenSpelling:
        """What the request asks for."""
        by_id = bool(body.return_tokens_as_token_ids)
        return cls("token_id:{}".format if by_id else engine.token_text, engine.token_bytes)


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs], token_text: Callable[[int], str], offset: int
) -> dict[str, list[object]]:
    """The parallel lists of /v1/completions; `offset` is where the first token's text begins in the choice.

    Of several tokens that look alike the likeliest keeps the place in `top_logprobs`.
    """
    tokens = [token_text(each.token_id) for each in logprobs]
    return {
        "tokens": list(tokens),
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [_top(each, token_text) for each in logprobs],
        "text_offset": _offsets(tokens, offset),
    }


def echoed_logprobs(
    token_ids: Sequence[int],
    records: Sequence[TokenLogprobs],
    num_top: int,
    token_text: Callable[[int], str],
) -> dict[str, list[object]]:
    """The same for a prompt that is echoed; its first token follows nothing and has none."""
    tokens = [token_text(token_id) for token_id in token_ids]
    top = [_top(each, token_text, num_top) for each in records]
    return {
        "tokens": list(tokens),
        "token_logprobs": [None, *(_finite(each.logprob) for each in records)],
        "top_logprobs": [None, *top],
        "text_offset": _offsets(tokens, 0),
    }


def _offsets(tokens: Sequence[str], offset: int) -> list[object]:
    offsets: list[object] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return offsets


def _top(
    logprobs: TokenLogprobs, token_text: Callable[[int], str], num_top: int | None = None
) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top[:num_top], (logprobs.token_id, logprobs.logprob)):
        top.setdefault(token_text(token_id), _finite(logprob))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprobs], spelling: TokenSpelling) -> dict[str, object]:
    """The list of records of /v1/chat/completions."""
    content = [
        {
            **_entry(each.token_id, each.logprob, spelling),
            "top_logprobs": [_entry(token_id, logprob, spelling) for token_id, logprob in each.top],
        }
        for each in logprobs
    ]
    return {"content": content}


def _entry(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    """`bytes` are the token's own: those of a character that several tokens share join to the character."""
    own = spelling.bytes(token_id)
    return {
        "token": spelling.text(token_id),
        "logprob": _finite(logprob),
        "bytes": None if own is None else list(own),
    }


def prompt_logprobs(
    records: Sequence[TokenLogprobs], num_top: int, token_text: Callable[[int], str]
) -> list[dict[str, object] | None]:
    """vLLM's list: null for the first token, then each token's own record and the likeliest ones', by id."""
    found: list[dict[str, object] | None] = [None]
    for each in records:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(each.top[:num_top], 1)]
        entries: dict[str, object] = {}
        for token_id, logprob, rank in ((each.token_id, each.logprob, each.rank), *ranked):
            entries.setdefault(
                str(token_id),
                {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_id)},
            )
        found.append(entries)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
