"""The memory that `slipstream serve` takes: when it is ready, after W1 to W4, and the most it ever took."""

from __future__ import annotations

import re
from pathlib import Path

from engine.compute.loading.model_files import weight_files
from tests.bench.context import BenchContext
from tests.bench.load import HttpSide, checked_figures, workloads_of_run
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section

WEIGHTS_SHARE = 1.3
ROOM_MB = 700.0  # for Python, libraries and what a step needs
KINDS = {"most ever": "VmHWM", "now": "VmRSS", "of files": "RssFile"}


def limit_mb(weight_bytes: int, kv_bytes: int) -> float:
    """The most that a server of this model and cache should ever take, in MB of a million bytes."""
    return (WEIGHTS_SHARE * weight_bytes + kv_bytes) / 1e6 + ROOM_MB


def memory_mb(status: str) -> dict[str, float]:
    """The figures of KINDS from a process's `/proc/PID/status`, in MB of a million bytes."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE))
    return {kind: int(found[name]) * 1024 / 1e6 for kind, name in KINDS.items()}


def run_memory(context: BenchContext) -> list[Section]:
    """The section `memory` with its bar; W1 to W4 are run `context.runs` times by one server."""
    section = Section("memory", "resident memory of slipstream serve")
    weight_bytes = sum(path.stat().st_size for path in weight_files(context.model_directory))
    kv_bytes = context.settings.cache.kv_cache_memory
    with Server(*context.flags) as server, JsonWorker("tests.bench.load_client") as client:
        status = Path(f"/proc/{server.process.pid}/status")
        server.wait_ready()
        _add(section, "ready", status)
        side = HttpSide(server, client)
        for run in range(context.runs):
            for workload in workloads_of_run(context.words, seed=run, cached=True):
                context.say(f"{workload.name}, run {run + 1}/{context.runs}")
                checked_figures(workload, side.burst(workload))
        most_mb = _add(section, "after W1 to W4", status)
    limit = limit_mb(weight_bytes, kv_bytes)
    section.bars.append(
        Bar("peak memory: 1.3 x weights + K/V + 700 MB", limit, "MB", most_mb, at_least=False)
    )
    section.notes.append(f"Weights {weight_bytes / 1e6:.0f} MB, K/V {kv_bytes / 1e6:.0f} MB.")
    return [section]


def _add(section: Section, case: str, status: Path) -> float:
    """Note the memory of the process with this `status`; the most it ever took, in MB."""
    found = memory_mb(status.read_text(encoding="utf-8"))
    for kind, megabytes in found.items():
        section.add(case, kind, "MB", [megabytes])
    return found["most ever"]
