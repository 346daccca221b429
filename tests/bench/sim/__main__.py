"""`python -m tests.bench.sim [names...] [--out FOLDER]`: simulate, print, keep JSON and plots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.bench.machine import REPOSITORY, about
from tests.bench.report import Section, bars_table, report_json
from tests.bench.sim.batching import run_chunks, run_memory, run_static
from tests.bench.sim.cost import CPU_LIKE, GPU_LIKE
from tests.bench.sim.long_queue import run_queue
from tests.bench.sim.plots import plot_sweep
from tests.bench.sim.policies import run_fairness, run_flood, run_sjf, run_sweep
from tests.bench.sim.promises import run_deadlines, run_prefixes, run_unknown_lengths

PLAIN_WIDTH = 120  # columns, where no terminal says how many there are
COSTS = {cost.name: cost for cost in (GPU_LIKE, CPU_LIKE)}

EXPERIMENTS: dict[str, Callable[..., Section]] = {
    "static": lambda cost: run_static(3000, cost=cost),
    "memory": lambda cost: run_memory(1500, cost=cost),
    "chunks": lambda cost: run_chunks(600, cost=cost),
    "sjf": lambda cost: run_sjf(5000, cost=cost),
    "deadlines": lambda cost: run_deadlines(1000, cost=cost),
    "lengths": lambda cost: run_unknown_lengths(300, cost=cost),
    "fair": lambda cost: run_fairness(2000, cost=cost),
    "flood": lambda cost: run_flood(60, cost=cost),
    "prefixes": lambda cost: run_prefixes(cost=cost),
    "queue": lambda cost: run_queue(1000),
    "sweep": lambda cost: run_sweep(1000, cost=cost),
}


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sim", description="Simulate the scheduler.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--cost", choices=COSTS, default=GPU_LIKE.name, help="how long a step takes")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".bench" / "sim", help="folder to write to")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no experiment is called {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    return arguments


def main() -> int:
    """Run what was asked for. A bar that is not met is a finding and not a fault: the exit code is 0."""
    arguments = read_arguments()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections: list[Section] = []
    for name, experiment in EXPERIMENTS.items():
        if arguments.names and name not in arguments.names:
            continue
        progress.print(Text(f"… {name}", style="dim"))
        section = experiment(COSTS[arguments.cost])
        section.show(console)
        sections.append(section)
        if name == "sweep":
            for path in plot_sweep(section, arguments.out):
                console.print(f"plotted in {path}", soft_wrap=True)
    bars = [bar for section in sections for bar in section.bars]
    if bars:
        console.print(Text("All bars", style="bold"))
        console.print(bars_table(bars))
    path = arguments.out / time.strftime("%Y%m%d-%H%M%S.json")
    report = report_json(about() | {"cost": arguments.cost}, sections)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
