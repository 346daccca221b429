"""A long prompt after a restart: K/V from disk against K/V still in memory, and against computing it."""

from __future__ import annotations

import re
import statistics
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.context import BenchContext
from tests.bench.load import HttpSide, checked_figures
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed
from tests.bench.workloads import Prompt, Workload, prompts_of

PROMPT_TOKENS = 4096
NUM_PROMPTS = 3  # a run
WARM_REPEATS = 3
OVER_WARM, OVER_COLD = 1.5, 0.25
WRITTEN_TIMEOUT_S = 60.0
BLOCK_TOKENS = 16
_WRITTEN = re.compile(r"^slipstream_prefix_cache_disk_written_blocks_total\S* (\d+)", re.MULTILINE)


def first_token_ms(http: HttpSide, prompt: Prompt) -> float:
    """Milliseconds to the first token of one request that is alone."""
    workload = Workload("restart", "", (prompt,), 1)
    return checked_figures(workload, http.burst(workload)).ttft_p50_ms


def wait_written(server: Server, num_blocks: int) -> None:
    """Return when so many blocks are on disk."""
    deadline = time.monotonic() + WRITTEN_TIMEOUT_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as reply:
            found = _WRITTEN.search(reply.read().decode())
        if found is not None and int(found[1]) >= num_blocks:
            return
        time.sleep(0.05)
    raise BenchmarkFailed(f"{num_blocks} blocks were not on disk after {WRITTEN_TIMEOUT_S:.0f} s")


def one_run(context: BenchContext, directory: Path, run: int) -> dict[str, list[float]]:
    """Milliseconds of every prompt: computed, in memory, and on disk after a restart."""
    flags = (*context.flags, "--prefix-cache-dir", str(directory))
    prompts = prompts_of(context.words, NUM_PROMPTS, PROMPT_TOKENS, seed=run)
    other = prompts_of(context.words, 2, PROMPT_TOKENS, seed=-1 - run)
    found: dict[str, list[float]] = {"computed": [], "in memory": [], "on disk": []}
    with ExitStack() as stack:
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        with Server(*flags) as server:
            server.wait_ready()
            http = HttpSide(server, client)
            first_token_ms(http, other[0])
            for prompt in prompts:
                found["computed"].append(first_token_ms(http, prompt))
                found["in memory"] += [first_token_ms(http, prompt) for _ in range(WARM_REPEATS)]
            wait_written(server, (NUM_PROMPTS + 1) * (PROMPT_TOKENS // BLOCK_TOKENS))
        with Server(*flags) as server:
            server.wait_ready()
            http = HttpSide(server, client)
            first_token_ms(http, other[1])
            found["on disk"] = [first_token_ms(http, prompt) for prompt in prompts]
    return found


def run_restart(context: BenchContext) -> list[Section]:
    """The section `restart` with its bars."""
    runs: dict[str, list[float]] = {}
    for run in range(context.runs):
        context.say(f"restart, run {run + 1}/{context.runs}")
        with TemporaryDirectory(prefix="slipstream-restart-") as directory:
            for case, times in one_run(context, Path(directory), run).items():
                runs.setdefault(case, []).append(statistics.median(times))
    section = Section("restart", f"time to the first token, idle server, {PROMPT_TOKENS}-token prompts")
    for case, times in runs.items():
        section.add(f"K/V {case}", "median of a run", "ms", times)
    for case, limit in (("in memory", OVER_WARM), ("computed", OVER_COLD)):
        ratios = [disk / other for disk, other in zip(runs["on disk"], runs[case], strict=True)]
        ratio = section.add(f"on disk over {case}", "median of a run", "x", ratios)
        section.bars.append(Bar(f"K/V on disk over {case}", limit, "x", ratio.median, at_least=False))
    return [section]
