"""What a run gives: its figures, and all that one must know to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from server.commands.bench.client_load import ClientLoad
from server.commands.bench.draft_speedup import DraftSpeedup
from server.commands.bench.plan import BenchPlan, Load, Workload
from server.commands.bench.record import RequestRecord
from server.commands.bench.summary import Summary, is_good
from server.commands.machine import machine, versions
from server.commands.remote.chunks import Drafts

FORMAT = 1  # counts up when a report's readers must change


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run that has ended, whole or `interrupted`.

    `began` is the wall-clock time as ISO 8601, `started` the same moment by `perf_counter`.
    `is_input_measured` is False when prompts are only about as long as asked for. `speedup` is the server's
    own account when the run ended, None where it gives none or nothing was drafted.
    """

    plan: BenchPlan
    model: str
    server_version: str | None
    is_input_measured: bool
    began: str
    started: float
    interrupted: bool
    records: Sequence[RequestRecord]
    summary: Summary
    client: ClientLoad
    speedup: DraftSpeedup | None = None


def make_report(result: BenchResult) -> dict[str, Any]:
    """The whole result as plain data for JSON; the API key is not in it."""
    summary, plan = result.summary, result.plan
    return {
        "format": FORMAT,
        "began": result.began,
        "interrupted": result.interrupted,
        "server": {
            "url": plan.address.url,
            "model": result.model,
            "version": result.server_version,
            "draft_speedup": None if result.speedup is None else asdict(result.speedup),
        },
        "settings": {
            "workload": _workload(plan.workload),
            "load": asdict(plan.load),
            "slos": asdict(plan.slos),
            "prompt_lengths": "measured" if result.is_input_measured else "estimated",
        },
        "client": {
            "machine": machine(),
            "versions": versions("slipstream", "httptools", "uvloop"),
            **asdict(result.client),
        },
        "summary": {**asdict(summary), "drafts": _drafts(summary.drafts)},
        "requests": [_request(record, result) for record in result.records],
    }


def mode_of(load: Load) -> str:
    """The kind of load in a few words."""
    if load.rate is not None:
        return f"open loop, {load.rate:g} requests/s"
    return f"closed loop, {load.concurrency} at a time"


def _workload(workload: Workload) -> dict[str, Any]:
    file = workload.prompt_file
    return {
        **asdict(workload),
        "input_tokens": None if file else str(workload.input_tokens),
        "output_tokens": str(workload.output_tokens),
        "prompt_file": None if file is None else str(file),
    }


def _drafts(drafts: Drafts | None) -> dict[str, Any] | None:
    if drafts is None:
        return None
    return {
        **asdict(drafts),
        "acceptance_rate": drafts.acceptance_rate,
        "tokens_per_step": drafts.tokens_per_step,
    }


def _request(record: RequestRecord, result: BenchResult) -> dict[str, Any]:
    """One request, its times in seconds from the run's start; a cut-off one has neither end nor error."""

    def since_start(at: float | None) -> float | None:
        return None if at is None else round(at - result.started, 6)

    return {
        "index": record.index,
        "due": since_start(record.due),
        "sent": since_start(record.sent),
        "ended": since_start(record.ended),
        "error": None if record.failure is None else asdict(record.failure),
        "retries": record.num_retries,
        "input_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "finish_reason": record.finish_reason,
        "good": is_good(record, result.plan.slos),
        "chunk_times": [since_start(at) for at in record.chunk_times],
    }
