"""`python -m tests.bench.medusa [--heads DIR] [--runs N] [--json FILE]`: what trained Medusa heads are worth.

The heads are those that `slipstream train-medusa --output DIR` wrote for the default model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from engine import prepare_process
from tests.bench.machine import REPOSITORY


def main() -> int:
    """Tune this process as the server tunes itself, which must come before torch, then measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.medusa", description=__doc__)
    parser.add_argument("--heads", type=Path, default=REPOSITORY / ".bench" / "medusa-smollm2", metavar="DIR")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median is shown (default 3)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: one a core)")
    parser.add_argument("--json", type=Path, default=REPOSITORY / ".bench" / "medusa.json", metavar="FILE")
    arguments = parser.parse_args()
    prepare_process()
    from rich.console import Console

    from tests.bench.machine import CpuWatch, about
    from tests.bench.medusa_speed import measure_all
    from tests.bench.report import report_json

    console, progress = Console(), Console(stderr=True)
    with CpuWatch() as watch:
        sections = measure_all(arguments.heads, arguments.runs, arguments.threads, progress.print)
    for section in sections:
        section.other_cpu_percent = watch.other_percent
        section.show(console)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = report_json(about() | {"heads": str(arguments.heads), "runs": arguments.runs}, sections)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
