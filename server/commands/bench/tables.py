"""The result of a benchmark on a terminal, in a pipe, wide or narrow."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.commands.bench.distribution import Distribution
from server.commands.bench.result import BenchResult, mode_of
from server.commands.bench.summary import Summary
from server.plain_words import counted

_CACHE_SHARE = 0.5


def show_result(result: BenchResult, console: Console) -> None:
    """Print everything that a person asks for first."""
    for line in _head(result):
        console.print(Text(line))
    if result.summary.num_succeeded:
        console.print()
        console.print(_latencies(result.summary))
        console.print()
        for line in _figures(result):
            console.print(Text(line))
    if result.summary.errors:
        console.print()
        console.print(_errors(result.summary))
    for warning in _warnings(result):
        console.print(Text(warning, style="yellow"))


def _head(result: BenchResult) -> Iterator[str]:
    summary, plan = result.summary, result.plan
    yield f"{result.model} at {plan.address.url}"
    yield f"{plan.workload.endpoint}, {mode_of(plan.load)}; --seed {plan.workload.seed} repeats it"
    parts = [f"{summary.num_succeeded} succeeded", f"{summary.num_failed} failed"]
    if summary.num_cut_off:
        parts.append(f"{summary.num_cut_off} cut off")
    if summary.num_retries:
        parts.append(f"{counted(summary.num_retries, 'retry', 'retries')}")
    stopped = ", interrupted" if result.interrupted else ""
    yield (
        f"{counted(summary.num_requests, 'request')} in {summary.seconds:.1f} s{stopped}: {', '.join(parts)}"
    )


def _latencies(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99", "max", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[str, Distribution | None]] = [
        ("to first token", summary.ttft_ms),
        ("between tokens", summary.inter_token_ms),
        ("per output token", summary.tpot_ms),
        ("whole request", summary.end_to_end_ms),
        ("queued in server", summary.queue_ms),
    ]
    for name, values in rows:
        if values is not None and values.count:
            shown = (values.p50, values.p90, values.p99, values.max, values.mean)
            table.add_row(name, *map(_ms, shown))
    return table


def _ms(value: float) -> str:
    """Three digits that count, more for large ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _figures(result: BenchResult) -> Iterator[str]:
    summary = result.summary
    counted = {"usage": "", "chunks": ", counted by chunks", "mixed": ", partly counted by chunks"}
    yield (
        f"output      {summary.output_tokens_per_s:,.1f} tokens/s, {summary.output_tokens:,} tokens"
        f"{counted[summary.counted_by]}"
    )
    if summary.input_tokens is not None:
        yield f"input       {summary.input_tokens:,} tokens{_cached(summary)}"
    yield f"requests    {summary.requests_per_s:,.2f}/s"
    if summary.goodput is not None:
        goodput = summary.goodput
        yield (
            f"goodput     {goodput.requests_per_s:,.2f} requests/s within the limits "
            f"({goodput.num_good} of them, {goodput.share:.0%})"
        )
    if summary.drafts is not None and summary.drafts.num_proposed:
        drafts = summary.drafts
        yield (
            f"drafts      {drafts.acceptance_rate:.0%} of {drafts.num_proposed:,} accepted, "
            f"{drafts.tokens_per_step:.2f} tokens a step that had some"
        )
        if result.speedup is not None:
            yield (
                f"speed-up    {result.speedup.measured:.2f} by drafts as the server measured it last, "
                f"{result.speedup.by_formula:.2f} by the formula"
            )
    elif summary.drafts is not None:
        yield "drafts      none"


def _cached(summary: Summary) -> str:
    """How many prompt tokens the server did not compute, where it says so."""
    if summary.cached_tokens is None or not summary.input_tokens:
        return ""
    return f", {summary.cached_tokens / summary.input_tokens:.0%} of them cached ({summary.cached_tokens:,})"


def _errors(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("failed", justify="right", no_wrap=True)
    table.add_column("why")
    table.add_column("first message", overflow="fold")
    for error in summary.errors:
        asked = "" if error.retry_after_s is None else f" (Retry-After {error.retry_after_s:.3g} s)"
        table.add_row(str(error.count), Text(error.kind), Text(error.message + asked))
    return table


def _warnings(result: BenchResult) -> Iterator[str]:
    summary, client = result.summary, result.client
    if summary.tokens_per_chunk is not None and summary.tokens_per_chunk >= 1.05:
        yield (
            f"Note: {summary.tokens_per_chunk:.2f} tokens came in a chunk on average; "
            '"between tokens" is between chunks.'
        )
    if not result.is_input_measured and result.plan.workload.prompt_file is None:
        yield "Note: the server has no /tokenize; prompts are only about as long as asked for."
    if summary.cached_tokens and summary.input_tokens and _is_of_the_cache(result):
        share = summary.cached_tokens / summary.input_tokens
        yield (
            f"Warning: {share:.0%} of the prompts came from the server's prefix cache: the times to first "
            "token are not those of new prompts. Leave --seed out, or give prompts that were not sent before."
        )
    if client.is_bottleneck:
        yield (
            f"Warning: this client ran {client.loop_lag_ms.p99:.0f} ms late at p99 and took "
            f"{client.cpu_share:.0%} of a core: the latencies are partly its own. "
            "Give it a less busy machine or a smaller load."
        )


def _is_of_the_cache(result: BenchResult) -> bool:
    """True where most of what prompts do not share on purpose was cached; a chat template is shared, too."""
    summary = result.summary
    shared = result.plan.workload.shared_prefix_tokens * summary.num_succeeded
    own = (summary.input_tokens or 0) - shared
    return own > 0 and ((summary.cached_tokens or 0) - shared) / own > _CACHE_SHARE
