"""Other engines beside ours in one run: the same prompts, in turns, everybody else held still."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tests.bench.contenders import OURS, OURS_DRAFTING, Comparison, open_ours, open_peers
from tests.bench.context import BenchContext
from tests.bench.load import gap_bar, section_of
from tests.bench.processes import JsonWorker
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed, BurstFigures
from tests.bench.workloads import (
    Words,
    Workload,
    eight_streams,
    mixed_lengths,
    one_stream,
    repeated_passage,
    shared_prefix,
)

Rate = Callable[[BurstFigures], float]

REPETITION_BAR = 5.0


def cold(words: Words, seed: int) -> Workload:
    """W4 with a prefix nobody has seen."""
    return shared_prefix(words, seed, warm=False)


def warm(words: Words, seed: int) -> Workload:
    """W4 with the prefix of the cold one."""
    return shared_prefix(words, seed, warm=True)


WORKLOADS = one_stream, eight_streams, mixed_lengths, cold, warm, repeated_passage


def output_rate(figures: BurstFigures) -> float:
    """Tokens a second of a whole burst."""
    return figures.output_tokens_per_s


def decode_rate(figures: BurstFigures) -> float:
    """Tokens a second of a stream that has begun."""
    return figures.decode_tokens_per_s


RATES: dict[str, Rate] = {"W1": decode_rate, "REP": decode_rate}  # of one stream; of the others all output
VLLM_BARS = {"W1": 1.25, "W2": 1.2, "W3": 1.2}
OUTPUT_BARS = {"W4 cold": 272.0, "W4 warm": 400.0}  # tokens/s


def run_peers(context: BenchContext) -> list[Section]:
    """A section for each side, and `peers` with the ratios and the bars."""
    comparison = Comparison()
    with ExitStack() as stack:
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        peers, comparison.failures = open_peers(context.peers, context, stack, client)
        contenders = [*open_ours(context, stack, client), *peers]
        comparison.run(context, contenders, WORKLOADS)
    require_ours(comparison)
    return [*side_sections(comparison), ratios_section(comparison)]


def run_repetitive(context: BenchContext) -> list[Section]:
    """The section `repetitive`: one stream that copies a text, our defaults against none drafted."""
    comparison = Comparison()
    with ExitStack() as stack:
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        comparison.run(context, open_ours(context, stack, client), [repeated_passage])
    require_ours(comparison)
    section = Section("repetitive", "one stream over HTTP, a passage to be repeated, 128 tokens out")
    for name, figures in comparison.figures.items():
        section.add(name, "decode", "tokens/s", map(decode_rate, figures["REP"]))
        section.add(name, "output", "tokens/s", map(output_rate, figures["REP"]))
        section.add(name, "TTFT", "ms", [run.ttft_p50_ms for run in figures["REP"]])
        section.add(name, "per event", "tokens", [run.tokens_per_event for run in figures["REP"]])
    section.bars.append(repetition_bar(comparison))
    section.notes.append(
        "Three passages of plain English by turns; each side waits while the other is asked."
    )
    return [section]


def require_ours(comparison: Comparison) -> None:
    """Raise BenchmarkFailed when our own server did not get through."""
    for name in (OURS, OURS_DRAFTING):
        if name in comparison.failures:
            raise BenchmarkFailed(f"{name} failed: {comparison.failures[name]}")


def side_sections(comparison: Comparison) -> list[Section]:
    """One for each side that finished something."""
    sections = []
    for name, figures in comparison.figures.items():
        section = section_of(name, figures, comparison.ran)
        section.title = "the same prompts, in turns with the others"
        section.notes = [f"{ran.name}: {ran.title}" for ran in comparison.ran.values()]
        sections.append(section)
    return sections


def ratios_section(comparison: Comparison) -> Section:
    """Ours over each peer's, run by run; drafts are compared where the text repeats itself."""
    section = Section("peers", "ours over theirs; above 1 ours is faster")
    for peer in comparison.figures:
        if peer in (OURS, OURS_DRAFTING):
            continue
        for workload in comparison.ran:
            ours = OURS_DRAFTING if workload == "REP" else OURS
            rate = RATES.get(workload, output_rate)
            unit = "decode rate" if rate is decode_rate else "output rate"
            case = f"{workload}, {ours} / {peer}"
            section.add(case, unit, "x", ratios(comparison, ours, peer, workload, rate))
            sooner = ratios(comparison, peer, ours, workload, lambda run: run.ttft_p50_ms)
            section.add(case, "TTFT, theirs / ours", "x", sooner)
    section.bars += bars(comparison)
    section.notes += [f"{name} FAILED: {why}" for name, why in comparison.failures.items()]
    section.notes.append("Ratios are run by run. Who is not asked is stopped, but for servers given by URL.")
    return section


def ratios(comparison: Comparison, above: str, below: str, workload: str, rate: Rate) -> tuple[float, ...]:
    """Of the runs that both finished."""
    pairs = zip(
        comparison.figures[above].get(workload, []),
        comparison.figures[below].get(workload, []),
        strict=False,  # who failed has fewer
    )
    return tuple(rate(one) / rate(other) for one, other in pairs)


def bars(comparison: Comparison) -> list[Bar]:
    """What was set in advance: against vLLM where it takes part, and for ourselves."""
    found = []
    if "vllm" in comparison.figures:
        for workload, limit in VLLM_BARS.items():
            rate = RATES.get(workload, output_rate)
            ratio = middle(ratios(comparison, OURS, "vllm", workload, rate))
            found.append(Bar(f"{workload} over vLLM's CPU build", limit, "x", ratio, at_least=True))
    ours = comparison.figures[OURS]
    for workload, limit in OUTPUT_BARS.items():
        output = middle([output_rate(run) for run in ours[workload]])
        found.append(Bar(f"{workload} output", limit, "tokens/s", output, at_least=True))
    return [*found, gap_bar(ours["W3"]), repetition_bar(comparison)]


def repetition_bar(comparison: Comparison) -> Bar:
    """What drafts gain where a text is repeated."""
    ratio = middle(ratios(comparison, OURS_DRAFTING, OURS, "REP", decode_rate))
    return Bar("repeated passage, drafting over not", REPETITION_BAR, "x", ratio, at_least=True)


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None
