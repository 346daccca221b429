"""`python -m tests.soak`: a server under mixed load for some minutes; exit code 1 when it loses anything.

`--saturate` asks for more than it can serve instead, with the default model. `--leak` is the soak's own test:
a server that loses K/V blocks by plan must be found out, and then the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console
from rich.text import Text

from config.schema import ModelSettings
from tests.bench.machine import REPOSITORY, CpuWatch, about
from tests.bench.processes import end_in_order
from tests.bench.report import BUSY_PERCENT, report_json
from tests.bench.streams import BenchmarkFailed
from tests.soak.run import SoakPlan, soak
from tests.soak.verdict import HELD, Verdict, details, judge, section_of

WIDTH = 120
PER_S = 40.0  # arrivals, of --saturate: 2560 tokens a second


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load a server for long.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", help="what to serve in place of a tiny random model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--saturate", action="store_true", help="open load above what the model can serve")
    parser.add_argument("--per-s", type=float, default=PER_S, help="arrivals a second of --saturate")
    parser.add_argument("--leak", action="store_true", help="have the server leak blocks, and find it out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the report (default .bench/soak/TIME.json)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="more flags of the server, behind --")
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace) -> SoakPlan:
    """What was asked for."""
    saturates = arguments.saturate
    return SoakPlan(
        seconds=60 * arguments.minutes,
        model=arguments.model or (ModelSettings().model if saturates else None),
        num_clients=arguments.clients,
        arrivals_per_s=arguments.per_s if saturates else None,
        leaks=arguments.leak,
        seed=arguments.seed,
        flags=tuple(arguments.flags),
    )


def failed(verdicts: list[Verdict], *, is_busy: bool) -> list[str]:
    """The names of the bars that were not met; times do not count on a machine that others keep busy."""
    return [each.bar.name for each in verdicts if not each.bar.met and not (each.is_timed and is_busy)]


def main() -> int:
    """Run it, show it, keep it."""
    arguments = read_arguments()
    end_in_order()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=WIDTH)
    plan, facts = plan_of(arguments), about()
    console.print_json(json.dumps(facts))
    try:
        with CpuWatch() as watch, TemporaryDirectory() as directory:
            found = uvloop.run(
                soak(plan, Path(directory), lambda text: progress.print(Text(f"… {text}", style="dim")))
            )
    except BenchmarkFailed as failure:
        console.print(Text(f"FAILED: {failure}", "bold red"), soft_wrap=True)
        return 1
    verdicts = judge(found)
    section = section_of(found, verdicts, plan.title)
    section.other_cpu_percent = watch.other_percent
    section.show(console)
    missed = failed(verdicts, is_busy=watch.other_percent > BUSY_PERCENT)
    path = arguments.json or REPOSITORY / ".bench" / "soak" / time.strftime("%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    report = report_json(facts | {"failed": missed, **details(found)}, [section])
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}", soft_wrap=True)
    if plan.leaks:
        console.print("The leak was found." if HELD in missed else "THE LEAK WAS NOT FOUND.")
        return 0 if HELD in missed else 1
    console.print(
        Text(f"FAILED: {', '.join(missed)}", "bold red") if missed else Text("All is well.", "green")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
