"""`python -m tests.bench.sim_spec [names...] [--out FOLDER]`: simulate, print, keep JSON and a plot."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.bench.machine import REPOSITORY, about
from tests.bench.report import Section, bars_table, report_json
from tests.bench.sim_spec.choices import run_lengths, run_schedules
from tests.bench.sim_spec.grid import grid_section, run_grid
from tests.bench.sim_spec.plots import plot_grid

PLAIN_WIDTH = 150  # columns, where no terminal says how many there are
NAMES = ("grid", "schedules", "lengths")


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sim_spec", description="Simulate drafting.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--seed", type=int, default=1, help="decides all luck")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / ".bench" / "sim-spec", help="folder to write to"
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"nothing is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return arguments


def main() -> int:
    """Run what was asked for. A bar that is not met is a finding and not a fault: the exit code is 0."""
    arguments = read_arguments()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections: list[Section] = []
    for number, name in enumerate(NAMES):
        if arguments.names and name not in arguments.names:
            continue
        progress.print(Text(f"… {name}", style="dim"))
        seed = 1000 * arguments.seed + 100 * number
        if name == "grid":
            rows = run_grid(seed=seed)
            section = grid_section(rows)
            console.print(f"plotted in {plot_grid(rows, arguments.out)}", soft_wrap=True)
        else:
            section = run_schedules(seed) if name == "schedules" else run_lengths(seed)
        section.show(console)
        sections.append(section)
    console.print(Text("All bars", style="bold"))
    console.print(bars_table([bar for section in sections for bar in section.bars]))
    path = arguments.out / time.strftime("%Y%m%d-%H%M%S.json")
    report = report_json(about() | {"seed": arguments.seed}, sections)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
