"""From a request's `speculation` and `prediction` to what the engine is asked, within what there is here."""

from __future__ import annotations

from engine import ContextLengthExceeded, DraftingChange, Engine, EngineInfo, SpeculationOptions
from server.api.openai.protocol import GenerationBody, Speculation
from server.http.errors import INVALID, ApiError, ErrorReply, invalid, shown


def speculation_options(body: GenerationBody, info: EngineInfo) -> SpeculationOptions:
    """What the request asks for, but for its prediction. Raises ApiError for what is not to be had here."""
    asked = body.speculation
    if asked is None:
        return SpeculationOptions()
    method = _method(asked, info)
    check_num_tokens(asked.num_tokens, info)
    return SpeculationOptions(
        enabled=asked.enabled is not False and asked.method != "none",
        method=None if method == "auto" else method,
        num_tokens=asked.num_tokens,
        length_policy=asked.length_policy,
    )


def speculation_change(asked: Speculation, info: EngineInfo) -> DraftingChange:
    """What is to change of a live request's drafting; to name a method turns it on. Raises ApiError."""
    method = _method(asked, info)
    check_num_tokens(asked.num_tokens, info)
    enabled = asked.enabled
    if enabled is not False and asked.method is not None:
        enabled = asked.method != "none"
    return DraftingChange(enabled, asked.num_tokens, asked.length_policy, method)


def _method(asked: Speculation, info: EngineInfo) -> str | None:
    """The engine's name of a method, "auto" for any of them, None where none is named."""
    if asked.method in (None, "none"):
        return None
    method = asked.method.replace("-", "_")
    if method != "auto" and method not in info.draft_methods:
        there_is = ", ".join(("auto", "none", *info.draft_methods))
        raise invalid(
            f"'speculation.method' is '{shown(method)}'; this server has {there_is}.",
            "speculation.method",
        )
    return method


def check_num_tokens(num_tokens: int | None, info: EngineInfo) -> None:
    """Refuse a longer draft than this server was started for. Raises ApiError."""
    if num_tokens is not None and num_tokens > info.max_draft_tokens:
        raise invalid(
            f"'speculation.num_tokens' is {num_tokens}; the limit is {info.max_draft_tokens}.",
            "speculation.num_tokens",
        )


async def read_prediction(body: GenerationBody, engine: Engine, tenant: str | None = None) -> tuple[int, ...]:
    """The predicted text's tokens, made off the loop in `tenant`'s turn; none without one.

    Raises ApiError for too many.
    """
    if body.prediction is None or not body.prediction.content:
        return ()
    limit = engine.info.max_model_len
    try:
        token_ids = await engine.text.encode(body.prediction.content, add_special_tokens=False, tenant=tenant)
    except ContextLengthExceeded:
        raise _too_long(limit) from None
    if len(token_ids) > limit:
        raise _too_long(limit)
    return tuple(token_ids)


def _too_long(limit: int) -> ApiError:
    message = f"'prediction' is longer than this model's maximum context length of {limit} tokens."
    return ApiError(ErrorReply(400, INVALID, message, "prediction", "context_length_exceeded"))
