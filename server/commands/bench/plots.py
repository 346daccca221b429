"""Charts of a run. Needs matplotlib, the extra `plot`; imported only when a chart is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from server.commands.bench.record import RequestRecord
from server.commands.bench.result import BenchResult, mode_of

_NUM_BINS = 60


def draw_charts(result: BenchResult, path: Path) -> None:
    """Write four charts to `path`: latencies as shares of requests, throughput and latency over time.

    Raises OSError when it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    plan = result.plan
    figure.suptitle(f"{result.model} at {plan.address.url}\n{plan.workload.endpoint}, {mode_of(plan.load)}")
    axes = figure.subplots(2, 2)
    good = [record for record in result.records if record.succeeded]
    _draw_shares(
        axes[0, 0],
        "time to first token",
        [1000 * record.ttft_s for record in good if record.ttft_s is not None],
        plan.slos.ttft_ms,
    )
    gaps = chain.from_iterable(record.gaps_s for record in good)
    _draw_shares(axes[0, 1], "between tokens", [1000 * gap for gap in gaps], plan.slos.itl_ms)
    _draw_throughput(axes[1, 0], result)
    _draw_over_time(axes[1, 1], good, result.started)
    figure.savefig(path, dpi=130)


def _draw_shares(axes: Any, title: str, values_ms: Sequence[float], limit_ms: float | None) -> None:
    """Which share of the values is at most so large."""
    ordered = sorted(values_ms)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    if limit_ms is not None:
        axes.axvline(limit_ms, color="tab:red", linestyle="--", label=f"limit {limit_ms:g} ms")
        axes.legend(loc="lower right")
    if ordered and ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
        axes.set_xscale("log")
    axes.set(title=title, xlabel="milliseconds", ylabel="share at most so long", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _draw_throughput(axes: Any, result: BenchResult) -> None:
    """Tokens as they came, each event weighted by its request's tokens an event."""
    span = max(result.summary.seconds, 1e-9)
    width = span / _NUM_BINS
    bins = [0.0] * _NUM_BINS
    for record in result.records:
        weight = record.num_output_tokens / len(record.chunk_times) if record.chunk_times else 0.0
        for at in record.chunk_times:
            bins[min(_NUM_BINS - 1, max(0, int((at - result.started) / width)))] += weight
    starts = [place * width for place in range(_NUM_BINS)]
    axes.bar(starts, [tokens / width for tokens in bins], width=width, align="edge")
    axes.set(title="output", xlabel="seconds", ylabel="tokens/s", xlim=(0, span))
    axes.grid(alpha=0.3)


def _draw_over_time(axes: Any, good: Sequence[RequestRecord], started: float) -> None:
    due = [record.due - started for record in good]
    axes.plot(due, [record.end_to_end_s for record in good], ".", label="whole request", alpha=0.6)
    firsts = [(record.due - started, record.ttft_s) for record in good if record.ttft_s is not None]
    axes.plot([at for at, _ in firsts], [ttft for _, ttft in firsts], ".", label="first token", alpha=0.6)
    axes.set(title="latency by arrival", xlabel="seconds", ylabel="seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if good:
        axes.legend()
