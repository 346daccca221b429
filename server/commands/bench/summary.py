"""From the records of a run to its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from server.commands.bench.distribution import Distribution
from server.commands.bench.plan import Slos
from server.commands.bench.record import RequestRecord
from server.commands.remote.chunks import Drafts

_GOOD_GAPS = 0.99


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failures of one kind; `retry_after_s` is the mean of what refusals asked for, None when none did."""

    kind: str
    count: int
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that succeeded and kept to every limit."""

    num_good: int
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of one run; times in milliseconds, of the requests that succeeded only.

    `counted_by` says who counted output tokens: "usage" (the server), "chunks" (events that brought text) or
    "mixed". None is what no reply told.
    """

    seconds: float
    num_requests: int
    num_succeeded: int
    num_failed: int
    num_cut_off: int
    num_retries: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    counted_by: str
    tokens_per_chunk: float | None
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution
    inter_token_ms: Distribution
    tpot_ms: Distribution
    end_to_end_ms: Distribution
    queue_ms: Distribution | None
    finish_reasons: dict[str, int]
    goodput: Goodput | None
    drafts: Drafts | None
    errors: tuple[ErrorCount, ...]


def summarize(records: Sequence[RequestRecord], seconds: float, slos: Slos) -> Summary:
    """The figures of `records`, which took `seconds` together."""
    good = [record for record in records if record.succeeded]
    failed = [record for record in records if record.failure is not None]
    span = max(seconds, 1e-9)
    output_tokens = sum(record.num_output_tokens for record in good)
    num_chunks = sum(len(record.chunk_times) for record in good)
    queues = [record.queue_ms for record in good if record.queue_ms is not None]
    drafts = [record.drafts for record in good if record.drafts is not None]
    reasons: dict[str, int] = defaultdict(int)
    for record in good:
        reasons[record.finish_reason or "none"] += 1
    return Summary(
        seconds=seconds,
        num_requests=len(records),
        num_succeeded=len(good),
        num_failed=len(failed),
        num_cut_off=len(records) - len(good) - len(failed),
        num_retries=sum(record.num_retries for record in records),
        input_tokens=_sum([record.num_prompt_tokens for record in good]),
        cached_tokens=_sum([record.num_cached_tokens for record in good]),
        output_tokens=output_tokens,
        counted_by=_counted_by(good),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        requests_per_s=len(good) / span,
        output_tokens_per_s=output_tokens / span,
        ttft_ms=_in_ms([record.ttft_s for record in good]),
        inter_token_ms=_in_ms(list(chain.from_iterable(record.gaps_s for record in good))),
        tpot_ms=_in_ms([record.tpot_s for record in good]),
        end_to_end_ms=_in_ms([record.end_to_end_s for record in good]),
        queue_ms=Distribution.of(queues) if queues else None,
        finish_reasons=dict(reasons),
        goodput=_goodput(records, span, slos) if slos.is_set else None,
        drafts=sum(drafts, Drafts()) if drafts else None,
        errors=_count_errors(failed),
    )


def is_good(record: RequestRecord, slos: Slos) -> bool:
    """True when it succeeded, its first token came in time and so did 99 % of the others."""
    if not record.succeeded:
        return False
    ttft_s = record.ttft_s
    if slos.ttft_ms is not None and (ttft_s is None or 1000 * ttft_s > slos.ttft_ms):
        return False
    if slos.itl_ms is None:
        return True
    gaps = record.gaps_s
    num_late = sum(1000 * gap > slos.itl_ms for gap in gaps)
    return num_late <= (1 - _GOOD_GAPS) * len(gaps)


def _goodput(records: Sequence[RequestRecord], seconds: float, slos: Slos) -> Goodput:
    """Those cut off count neither way: how they would have ended is unknown."""
    ended = [record for record in records if record.succeeded or record.failure is not None]
    num_good = sum(is_good(record, slos) for record in ended)
    return Goodput(num_good, num_good / len(ended) if ended else 0.0, num_good / seconds)


def _count_errors(failed: Sequence[RequestRecord]) -> tuple[ErrorCount, ...]:
    """The most frequent kind first, with the message of its first failure."""
    by_kind: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in failed:
        assert record.failure is not None
        by_kind[record.failure.kind].append(record)
    counts = []
    for kind, records in by_kind.items():
        failures = [record.failure for record in records if record.failure is not None]
        asked = [each.retry_after_s for each in failures if each.retry_after_s is not None]
        mean = sum(asked) / len(asked) if asked else None
        counts.append(ErrorCount(kind, len(failures), failures[0].message, mean))
    return tuple(sorted(counts, key=lambda each: (-each.count, each.kind)))


def _counted_by(good: Sequence[RequestRecord]) -> str:
    by_server = {record.is_counted_by_server for record in good}
    return {frozenset({True}): "usage", frozenset({True, False}): "mixed"}.get(frozenset(by_server), "chunks")


def _in_ms(values_s: Sequence[float | None]) -> Distribution:
    return Distribution.of(1000 * value for value in values_s if value is not None)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
