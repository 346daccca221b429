"""The command `python -m tests.bench.gpu`: a process a section, each with its time, tables and JSON.

A process of its own, since an error on the device leaves nothing that one can go on with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.codes import run_codes
from tests.bench.gpu.curve import run_curve
from tests.bench.gpu.decode import run_decode
from tests.bench.gpu.drafts import run_drafts
from tests.bench.gpu.experts import run_experts
from tests.bench.gpu.guided import run_guided
from tests.bench.gpu.idle import run_idle
from tests.bench.gpu.peer import run_peer
from tests.bench.gpu.prefill import run_prefill
from tests.bench.gpu.rounds import run_rounds
from tests.bench.gpu.sizes import FULL, SMALL
from tests.bench.gpu.states import run_states
from tests.bench.gpu.steps import run_steps
from tests.bench.machine import about, package
from tests.bench.report import Bar, Json, Measurement, Section, bars_table, report_json

PLAIN_WIDTH = 140  # columns, where no terminal says how many there are


class Part(NamedTuple):
    """A section and the seconds it may take, with loading, on a large GPU."""

    run: Callable[[Bench], Section]
    seconds: float
    is_of_all: bool = True


# In nine minutes together, but those that are only measured when they are named.
PARTS: dict[str, Part] = {
    "decode": Part(run_decode, 70),
    "steps": Part(run_steps, 45),
    "prefill": Part(run_prefill, 35),
    "idle": Part(run_idle, 80),
    "guided": Part(run_guided, 60),
    "transformers": Part(run_peer, 70),
    "drafts": Part(run_drafts, 110),
    "curve": Part(run_curve, 70),
    "codes": Part(run_codes, 180, is_of_all=False),
    "experts": Part(run_experts, 60, is_of_all=False),
    "states": Part(run_states, 120, is_of_all=False),
    "rounds": Part(run_rounds, 60, is_of_all=False),
}


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description="Slipstream on a CUDA device."
    )
    left_out = ", ".join(name for name, part in PARTS.items() if not part.is_of_all)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}; default: all but {left_out}"
    )
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device, to try this")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)  # one section, to this file
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in PARTS]
    arguments.wanted = [
        name
        for name, part in PARTS.items()
        if name in arguments.names or (part.is_of_all and not arguments.names)
    ]
    if unknown:
        parser.error(f"no section is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return arguments


def run(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for; 1 if a section could not be, 2 without a GPU, whatever the bars say."""
    arguments = read_arguments(argv)
    if not (arguments.small or torch.cuda.is_available()):
        print("This needs a CUDA device; --small tries the benchmark without one.", file=sys.stderr)
        return 2
    if arguments.part is not None:
        return run_part(arguments.names[0], arguments.part, small=arguments.small)
    console = Console() if Console().is_terminal else Console(width=PLAIN_WIDTH)
    facts = about() | {"triton": package("triton"), "cuda": torch.version.cuda}
    console.print_json(json.dumps(facts))
    started = time.perf_counter()
    sections: list[Section] = []
    failures: list[str] = []
    for name in arguments.wanted:
        section, failure = in_a_process(name, small=arguments.small)
        if section is not None:
            section.show(console)
            sections.append(section)
        if failure is not None:
            failures.append(f"{name}: {failure}")
            console.print(Text(f"NOT MEASURED, or not all of it: {failures[-1]}\n", "bold red"))
        if arguments.json is not None:  # at once, should the rest not come
            report = report_json(facts | {"failures": failures}, sections)
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(bars_table([bar for section in sections for bar in section.bars]))
    console.print(f"{time.perf_counter() - started:.0f} s")
    return 1 if failures else 0


def in_a_process(name: str, *, small: bool) -> tuple[Section | None, str | None]:
    """What a section found, and what went wrong; None for nothing."""
    with TemporaryDirectory() as directory:
        found = Path(directory, "section.json")
        command = [sys.executable, "-m", "tests.bench.gpu", name, "--part", str(found)]
        failure = None
        try:
            done = subprocess.run(
                command + ["--small"] * small, stdout=sys.stderr, timeout=PARTS[name].seconds, check=False
            )
            if done.returncode:
                failure = f"ended with {done.returncode}; its last words are above"
        except subprocess.TimeoutExpired:
            failure = f"took more than {PARTS[name].seconds:.0f} s"
        section = None
        if found.is_file():
            section = section_of(name, json.loads(found.read_text(encoding="utf-8")))
        return section, failure


def run_part(name: str, path: Path, *, small: bool) -> int:
    """Run one section here and write what it finds to `path`, as far as it has come."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"… {time.perf_counter() - started:5.1f} s {name}: {text}", file=sys.stderr, flush=True)

    def keep(section: Section) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(section.to_json()), encoding="utf-8")
        part.replace(path)  # whole, even if this process is killed meanwhile

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    bench = Bench(torch.device(device), SMALL if small else FULL, say, keep)
    keep(PARTS[name].run(bench))
    say("done")
    return 0


def section_of(name: str, found: Json) -> Section:
    """The section that was written as this JSON."""
    section = Section(name, found["title"], notes=list(found["notes"]))
    section.measurements = [
        Measurement(one["case"], one["quantity"], one["unit"], tuple(one["runs"]))
        for one in found["measurements"]
    ]
    section.bars = [_bar_of(one) for one in found["bars"]]
    return section


def _bar_of(found: dict[str, Any]) -> Bar:
    at_least = found["direction"] == "at least"
    return Bar(found["bar"], found["limit"], found["unit"], found["measured"], at_least=at_least)
