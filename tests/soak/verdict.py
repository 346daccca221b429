"""From what was seen to the bars of a soak. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.report import Bar, Section
from tests.bench.streams import percentile
from tests.soak.errands import CHAT, COMPLETIONS
from tests.soak.tally import Tally
from tests.soak.vitals import Samples, Vitals

MAX_GROWTH_MB = 5.0
MAX_HEALTH_MS = 100.0
MAX_DRIFT = 1.1
MIN_SATURATED = 0.9
CLOSED = "499"  # counted where a client left before the end
HELD = "K/V blocks held at rest"


@dataclass(frozen=True, slots=True)
class Probes:
    """Of /health: how long each took, and the second and status of those that were not answered with 200."""

    taken_ms: Sequence[float]
    bad: Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Findings:
    """All of one soak. `seen` is under load; `before` and `after` it the server rests, `page` is the last.

    `saturated_s`: for so long there was to be a queue; None when there need not be one.
    """

    tally: Tally
    seen: Sequence[Vitals]
    before: Vitals
    after: Vitals
    page: Samples
    probes: Probes
    errors_logged: Sequence[str]
    exit_code: int
    saturated_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar. What `is_timed` hangs on what else the machine does, too."""

    bar: Bar
    is_timed: bool = False


def judge(found: Findings) -> list[Verdict]:
    """Every bar of a soak."""
    return [*_resources(found), *_counts(found), *_times(found)]


def _most(name: str, limit: float, unit: str, measured: float | None) -> Bar:
    return Bar(name, limit, unit, measured, at_least=False)


def _resources(found: Findings) -> Iterator[Verdict]:
    before, after = found.before, found.after
    growth = rss_growth_mb(found.seen)
    yield Verdict(_most("memory, growth over the second half", MAX_GROWTH_MB, "MB", growth))
    yield Verdict(_most(HELD, 0, "", after.blocks_used))
    yield Verdict(_most("requests open at rest", 0, "", after.num_running + after.num_waiting))
    yield Verdict(_most("files open at rest, more than before", 0, "", after.num_fds - before.num_fds))
    # A pool fills up with time; but not for ever.
    early = max((each.num_threads for each in found.seen[: len(found.seen) // 2]), default=0)
    yield Verdict(_most("threads at rest, more than in the first half", 0, "", after.num_threads - early))
    yield Verdict(_most("child processes, more than before", 0, "", after.num_children - before.num_children))
    yield Verdict(_most("exit code after SIGTERM, off 0", 0, "", abs(found.exit_code)))


def _counts(found: Findings) -> Iterator[Verdict]:
    tally, page = found.tally, found.page
    yield Verdict(Bar("canaries sung, each like the first", 2, "", tally.num_canaries, at_least=True))
    yield Verdict(_most("surprises to clients", 0, "", tally.num_surprises))
    yield Verdict(_most("faults the server counted", 0, "", page.total("engine_errors_total")))
    yield Verdict(_most("errors in the log", 0, "", len(found.errors_logged)))
    answered = answered_by_code(page)
    statuses = {str(status): count for status, count in tally.statuses.items()}
    yield Verdict(
        _most(
            "requests that clients and server count apart", 0, "", apart(tally.num_sent, statuses, answered)
        )
    )
    yield Verdict(_most("requests without one outcome", 0, "", without_outcome(tally.num_sent, page)))


def _times(found: Findings) -> Iterator[Verdict]:
    taken_ms = found.probes.taken_ms
    yield Verdict(_most("/health, answers other than 200", 0, "", len(found.probes.bad)))
    health = percentile(taken_ms, 99) if taken_ms else None
    yield Verdict(_most("/health p99", MAX_HEALTH_MS, "ms", health), is_timed=True)
    if found.saturated_s is not None:
        looks = [each for each in found.seen if each.at - found.seen[0].at < found.saturated_s]
        share = statistics.mean(each.num_waiting > 0 for each in looks)
        yield Verdict(Bar("share of looks that saw a queue", MIN_SATURATED, "", share, at_least=True))
    else:
        drift = first_token_drift(found.tally.first_tokens)
        yield Verdict(_most("first token p99, second half over first", MAX_DRIFT, "x", drift), is_timed=True)


def rss_growth_mb(seen: Sequence[Vitals]) -> float | None:
    """The median of the last tenth less that of a tenth in the middle; None for too few looks."""
    width = len(seen) // 10
    if not width:
        return None
    middle = (len(seen) - width) // 2
    rss_mb = [vitals.rss_mb for vitals in seen]
    return statistics.median(rss_mb[-width:]) - statistics.median(rss_mb[middle : middle + width])


def first_token_drift(first_tokens: Sequence[tuple[float, float]]) -> float | None:
    """The p99 of the later half of the time over that of the earlier; None without streams in either."""
    if not first_tokens:
        return None
    middle = (first_tokens[0][0] + first_tokens[-1][0]) / 2
    early = [seconds for at, seconds in first_tokens if at < middle]
    late = [seconds for at, seconds in first_tokens if at >= middle]
    return percentile(late, 99) / percentile(early, 99) if early and late else None


def answered_by_code(page: Samples) -> dict[str, float]:
    """Requests for text by status, as the server counted them."""
    codes: dict[str, float] = {}
    for route in (COMPLETIONS, CHAT):
        for code, count in page.by("http_requests_total", "code", route=route).items():
            codes[code] = codes.get(code, 0) + count
    return codes


def apart(num_sent: int, statuses: Mapping[str, int], answered: Mapping[str, float]) -> float:
    """By how much the two sides disagree: what was sent at all, and each status that a client read.

    A reply may have met nobody any more; but none can have been read that was not given.
    """
    invented = sum(max(0, count - answered.get(code, 0)) for code, count in statuses.items())
    return abs(num_sent - sum(answered.values())) + invented


def without_outcome(num_sent: int, page: Samples) -> float:
    """Requests that were neither refused nor finished, or more than once.

    Only a client that left may have done so before its request was accepted.
    """
    answered = answered_by_code(page)
    refused = sum(count for code, count in answered.items() if code[0] == "4" and code != CLOSED)
    rejected = page.total("requests_rejected_total") - page.total(
        "requests_rejected_total", reason="queue_timeout"
    )
    missing = num_sent - refused - rejected - page.total("requests_total")
    return max(0.0, -missing, missing - answered.get(CLOSED, 0))


def section_of(found: Findings, verdicts: Sequence[Verdict], title: str) -> Section:
    """Tables of it all."""
    section = Section("soak", title)
    seen = found.seen
    for quantity, unit, values in (
        ("memory", "MB", [vitals.rss_mb for vitals in seen]),
        ("files", "", [vitals.num_fds for vitals in seen]),
        ("threads", "", [vitals.num_threads for vitals in seen]),
        ("blocks used", "", [vitals.blocks_used for vitals in seen]),
        ("waiting", "", [vitals.num_waiting for vitals in seen]),
    ):
        section.add("under load, each second", quantity, unit, values)
    section.bars += [verdict.bar for verdict in verdicts]
    page = found.page
    for what, counts in (
        ("clients saw", found.tally.to_json()),
        ("answered", answered_by_code(page)),
        ("finished", page.by("requests_total", "finish_reason")),
        ("rejected", page.by("requests_rejected_total", "reason")),
        ("aborted", page.by("request_aborts_total", "reason")),
        ("preempted", page.by("preemptions_total", "mode")),
    ):
        section.notes.append(f"{what}: {counts}")
    steps = page.by("step_duration_seconds_count", "phase")
    took_s = page.by("step_duration_seconds_sum", "phase")
    each_ms = {phase: round(1e3 * took_s[phase] / count, 1) for phase, count in steps.items()}
    section.notes.append(f"generated: {page.total('generation_tokens_total'):,.0f} tokens")
    section.notes.append(f"steps: {steps}, of {each_ms} ms")
    section.notes += [f"logged: {line[:300]}" for line in found.errors_logged[:10]]
    return section


def details(found: Findings) -> dict[str, Any]:
    """What the report keeps beside the section."""
    start = found.seen[0].at if found.seen else 0.0
    return {
        "clients": found.tally.to_json(),
        "vitals": [
            [
                round(each.at - start, 1),
                each.rss_mb,
                each.num_fds,
                each.num_threads,
                each.blocks_used,
                each.num_waiting,
            ]
            for each in found.seen
        ],
        "health_bad": list(found.probes.bad),
    }
