"""What a reply reports about itself: tokens used, and how long each part took."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Finish
from server.generation import Choice

_NO_SPECULATION = {
    "mean_acceptance_length": 0.0,
    "draft_acceptance_rate": 0.0,
    "acceptance_histogram": [],
    "num_spec_steps": 0,
    "num_draft_tokens": 0,
    "num_accepted_draft_tokens": 0,
}


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def choice_usage(choice: Choice) -> dict[str, object]:
    """One choice's usage so far; cached tokens are known only at its end."""
    cached = 0 if choice.finish is None else choice.finish.num_cached_tokens
    return usage_object(len(choice.prompt.token_ids), choice.num_tokens, cached)


def reply_usage(choices: Sequence[Choice]) -> dict[str, object]:
    """The whole reply's usage: a prompt counts once, however many choices it got."""
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    return usage_object(
        sum(len(choice.prompt.token_ids) for choice in firsts),
        sum(choice.num_tokens for choice in choices),
        sum(choice.finish.num_cached_tokens for choice in firsts if choice.finish is not None),
    )


def reply_metrics(choices: Sequence[Choice]) -> dict[str, object]:
    """vLLM's per-request `metrics` in milliseconds; of several choices the first token and the longest times.

    None where there was no such token. `tokens_per_second` counts every token after the first.
    """
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    timings = [finish.timing for finish in finishes]
    firsts = [each.time_to_first_token_s for each in timings if each.time_to_first_token_s is not None]
    gaps = [each.mean_itl_s for each in timings if each.mean_itl_s is not None]
    generation_s = max((each.generation_s for each in timings), default=0.0)
    return {
        "time_to_first_token_ms": _ms(min(firsts)) if firsts else None,
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(max((each.queue_s for each in timings), default=0.0)),
        "mean_itl_ms": _ms(sum(gaps) / len(gaps)) if gaps else None,
        "tokens_per_second": _tokens_per_second(finishes, generation_s),
        "num_preemptions": sum(each.num_preemptions for each in timings),
        "speculative_decoding": dict(_NO_SPECULATION),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _tokens_per_second(finishes: Sequence[Finish], generation_s: float) -> float | None:
    if generation_s <= 0:
        return None
    return round(sum(max(0, each.num_output_tokens - 1) for each in finishes) / generation_s, 3)
