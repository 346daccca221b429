"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine import TokenLogprobs

TokenText = Callable[[int], str]

# JSON has no infinity; vLLM's stand-in for a token that cannot be drawn.
_LOWEST = -9999.0


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs], token_text: TokenText, offset: int
) -> dict[str, object]:
    """The parallel lists of /v1/completions; `offset` is where the first token's text begins in the choice.

    Of several tokens that look alike the likeliest keeps the place in `top_logprobs`.
    """
    tokens = [token_text(each.token_id) for each in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [_top(each, token_text) for each in logprobs],
        "text_offset": offsets,
    }


def _top(logprobs: TokenLogprobs, token_text: TokenText) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (logprobs.token_id, logprobs.logprob)):
        top.setdefault(token_text(token_id), _finite(logprob))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprobs], token_text: TokenText) -> dict[str, object]:
    """The list of records of /v1/chat/completions."""
    content = [
        {
            **_entry(token_text(each.token_id), each.logprob),
            "top_logprobs": [_entry(token_text(token_id), logprob) for token_id, logprob in each.top],
        }
        for each in logprobs
    ]
    return {"content": content}


def _entry(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
