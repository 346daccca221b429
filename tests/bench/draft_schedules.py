"""`python -m tests.bench.draft_schedules [--draft-model DIR]`: a real pair, by schedule, in turns.

One engine each, all in this process and on the same weights' copies; only one has requests at a time. "fixed"
verifies four drafts in every round whatever they bring, so that the schedules themselves can be compared; the
others draft as the defaults have it, which may be not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engine import prepare_process
from tests.bench.machine import REPOSITORY, CpuWatch, about

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.report import Section

FIXED = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
ARMS = {
    "off": ("--speculative-method", "none"),
    "sync, fixed": ("--speculation-schedule", "sync", *FIXED),
    "async, fixed": ("--speculation-schedule", "async", *FIXED),
    "sync": ("--speculation-schedule", "sync"),
    "async": ("--speculation-schedule", "async"),
    "auto": ("--speculation-schedule", "auto"),
}
BAR = 0.95
TOKENS = 160


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.draft_schedules")
    directory = REPOSITORY / ".bench" / "draft-smollm2"
    parser.add_argument("--draft-model", type=Path, default=directory, help="what draft_pair made")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median is shown (default 3)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--json", type=Path, default=REPOSITORY / ".bench" / "draft-schedules.json")
    return parser.parse_args()


def main() -> int:
    """Tune this process as the server tunes itself, which must come before torch, then measure."""
    arguments = read_arguments()
    prepare_process()
    import uvloop
    from rich.console import Console

    from tests.bench.report import report_json

    with CpuWatch() as watch:
        section = uvloop.run(measure(arguments, Console(stderr=True)))
    section.other_cpu_percent = watch.other_percent
    section.show(Console())
    report = report_json(about() | {"draft model": str(arguments.draft_model.name)}, [section])
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


async def measure(arguments: argparse.Namespace, console: Console) -> Section:
    """All arms at all batch sizes, run by run."""
    from config import load_settings
    from tests.bench.context import BenchContext
    from tests.bench.decode import loaded_engine
    from tests.bench.report import Bar, Section
    from tests.bench.speculation import QUESTIONS, Case

    pair = ("--speculative-method", "draft-model", "--draft-model", str(arguments.draft_model))
    section = Section("draft schedules", "a real draft model, by schedule; greedy, ordinary text")
    async with AsyncExitStack() as stack:
        engines = {}
        for arm, flags in ARMS.items():
            flags = flags if arm == "off" else (*pair, *flags)
            settings = load_settings(["--kv-cache-memory", "256MiB", "--max-model-len", "2048", *flags])
            context = BenchContext(settings, flags, arguments.runs, console.print)
            engines[arm] = (await stack.enter_async_context(loaded_engine(context))).engine
        prompts = [
            await engines["off"].text.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS
        ]
        for batch in arguments.batches:
            chosen = [prompts[i % len(prompts)] for i in range(batch)]
            cases = {arm: Case(f"batch {batch}, {arm}", chosen, TOKENS, 0.0, BAR, batch) for arm in ARMS}
            for run in range(-1, arguments.runs):
                for arm, case in cases.items():
                    console.print(f"… {case.name}, run {run + 1}/{arguments.runs}")
                    rate = await case.rate(engines[arm], run + 1, enabled=True)
                    if run >= 0:
                        case.on.append(rate)
            medians = {}
            for arm, case in cases.items():
                medians[arm] = section.add(case.name, "rate", "tokens/s", case.on).median or 0.0
                section.add(case.name, "acceptance", "", [case.stats.acceptance_rate])
                section.add(case.name, "tokens a round", "", [case.tokens_a_round])
            best = max(medians[arm] for arm in ("off", "sync", "async"))
            name = f"batch {batch}: auto over the best of off, sync, async"
            section.bars.append(Bar(name, BAR, "x", medians["auto"] / best, at_least=True))
    return section


if __name__ == "__main__":
    sys.exit(main())
