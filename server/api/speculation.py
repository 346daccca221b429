"""From a request's `speculation` and `prediction` to SpeculationOptions, within what this server has."""

from __future__ import annotations

from engine import ContextLengthExceeded, Engine, EngineInfo, SpeculationOptions
from server.api.openai.protocol import GenerationBody
from server.http.errors import INVALID, ApiError, ErrorReply, invalid, shown


def speculation_options(body: GenerationBody, info: EngineInfo) -> SpeculationOptions:
    """What the request asks for, but for its prediction. Raises ApiError for what is not to be had here."""
    asked = body.speculation
    if asked is None:
        return SpeculationOptions()
    method = None if asked.method in (None, "auto", "none") else asked.method.replace("-", "_")
    if method is not None and method not in info.draft_methods:
        there_is = ", ".join(("auto", "none", *info.draft_methods))
        raise invalid(
            f"'speculation.method' is '{shown(method)}'; this server has {there_is}.",
            "speculation.method",
        )
    if asked.num_tokens is not None and asked.num_tokens > info.max_draft_tokens:
        raise invalid(
            f"'speculation.num_tokens' is {asked.num_tokens}; the limit is {info.max_draft_tokens}.",
            "speculation.num_tokens",
        )
    is_enabled = asked.enabled is not False and asked.method != "none"
    return SpeculationOptions(enabled=is_enabled, method=method, num_tokens=asked.num_tokens)


async def read_prediction(body: GenerationBody, engine: Engine, tenant: str | None = None) -> tuple[int, ...]:
    """The predicted text's tokens, made off the loop in `tenant`'s turn; none without one.

    Raises ApiError for too many.
    """
    if body.prediction is None or not body.prediction.content:
        return ()
    limit = engine.info.max_model_len
    try:
        token_ids = await engine.encode(body.prediction.content, add_special_tokens=False, tenant=tenant)
    except ContextLengthExceeded:
        raise _too_long(limit) from None
    if len(token_ids) > limit:
        raise _too_long(limit)
    return tuple(token_ids)


def _too_long(limit: int) -> ApiError:
    message = f"'prediction' is longer than this model's maximum context length of {limit} tokens."
    return ApiError(ErrorReply(400, INVALID, message, "prediction", "context_length_exceeded"))
