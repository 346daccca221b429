"""What a reply reports about itself: tokens used, and how long each part took."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine import Finish, SpecStats
from server.api.generation import Choice

PREDICTION = "prediction"  # the method whose drafts come from the caller


def choice_usage(choice: Choice, *, predicted: bool = False) -> dict[str, object]:
    """OpenAI's `usage` of one choice so far; cached and predicted tokens are known only at its end."""
    return _usage([choice], [choice], predicted)


def reply_usage(choices: Sequence[Choice], *, predicted: bool = False) -> dict[str, object]:
    """The whole reply's usage: a prompt counts once, however many choices it got.

    `predicted` adds what became of the prediction that the request came with.
    """
    return _usage(one_a_prompt(choices), choices, predicted)


def one_a_prompt(choices: Sequence[Choice]) -> Collection[Choice]:
    """The first choice of each prompt."""
    return {id(choice.prompt): choice for choice in reversed(choices)}.values()


def num_cached_tokens(firsts: Collection[Choice]) -> int:
    """Prompt tokens that were found and not computed; 0 for what has not ended."""
    return sum(choice.finish.num_cached_tokens for choice in firsts if choice.finish is not None)


def _usage(firsts: Collection[Choice], choices: Sequence[Choice], predicted: bool) -> dict[str, object]:
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    usage: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(firsts)},
    }
    details = _completion_details(choices, predicted)
    if details:
        usage["completion_tokens_details"] = details
    return usage


def _completion_details(choices: Sequence[Choice], predicted: bool) -> dict[str, int]:
    """What became of a prediction, and how much was thought by a model that does."""
    details: dict[str, int] = {}
    num_thought = num_reasoning_tokens(choices)
    if num_thought is not None:
        details["reasoning_tokens"] = num_thought
    if predicted:
        stats = spec_stats(choices)
        accepted = stats.accepted[PREDICTION]
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = stats.proposed[PREDICTION] - accepted
    return details


def num_reasoning_tokens(choices: Sequence[Choice]) -> int | None:
    """Tokens that were thought; None for a model that never thinks."""
    readers = [choice.reader for choice in choices if choice.reader is not None and choice.reader.thinks]
    return sum(reader.num_reasoning_tokens for reader in readers) if readers else None


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
        "num_preemptions": sum(len(each.preemptions) for each in timings),
        "speculative_decoding": _speculative_decoding(spec_stats(choices)),
    }


def spec_stats(choices: Sequence[Choice]) -> SpecStats:
    """Of those choices that have ended, together."""
    total = SpecStats()
    for choice in choices:
        if choice.finish is not None and choice.finish.speculation is not None:
            total.add(choice.finish.speculation)
    return total


def _speculative_decoding(stats: SpecStats) -> dict[str, object]:
    """vLLM's account of a reply's drafts; entry i of the histogram counts rounds that accepted i of them.

    The mean is null where nothing was drafted, for a zero would spoil a client's average over its replies.
    """
    mean = round(stats.mean_acceptance_length, 4) if stats.num_rounds else None
    return {
        "mean_acceptance_length": mean,
        "draft_acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_spec_steps": stats.num_rounds,
        "num_draft_tokens": stats.num_proposed,
        "num_accepted_draft_tokens": stats.num_accepted,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _tokens_per_second(finishes: Sequence[Finish], generation_s: float) -> float | None:
    if generation_s <= 0:
        return None
    return round(sum(max(0, each.num_output_tokens - 1) for each in finishes) / generation_s, 3)
