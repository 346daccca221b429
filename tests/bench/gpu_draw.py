"""The draw of filtered rows alone: `python -m tests.bench.gpu_draw [--json FILE]`, in less than a minute.

Top-k and top-p over a vocabulary of 128,256 in bfloat16: the kernels that a device gets, recorded, and what
they cost the host unrecorded, beside the sort that they stand for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from engine.compute.cuda.device_draw import TORCH_DRAWS, FilteredDraw
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.recorder import CudaRecorder
from engine.compute.sampling.noise import row_keys
from engine.compute.sampling.processors import Filters
from tests.bench.gpu.device_rates import seconds_of
from tests.bench.machine import about
from tests.bench.report import Bar, Section, report_json
from tests.support.sampling_reference import Row, inputs_of

VOCAB = 128_256
BATCHES = (1, 32, 128)
BAR_MS = 0.2  # of the largest batch
REPEATS = 10
RUNS = 5
ASKED = {
    "top-k 20, top-p 0.95": Row(temperature=0.7, top_k=20, top_p=0.95),
    "top-p 0.9": Row(top_p=0.9),
    "top-k 50": Row(top_k=50),
}


class Case(NamedTuple):
    """Rows that ask for the same, with keys of their own."""

    logits: torch.Tensor  # [n, vocab]
    places: torch.Tensor
    filters: Filters
    keys: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, row: Row) -> Case:
        """As the runner has it sent."""
        rows, device = np.arange(len(logits)), logits.device
        inputs = inputs_of([row] * len(rows))
        filters = Filters.of_rows(inputs, rows, VOCAB, device)
        keys = row_keys(rows, rows).to(device)
        return cls(logits, torch.from_numpy(rows).to(device), filters, keys)


def logits_of(kind: str, batch: int, device: torch.device) -> torch.Tensor:
    """`peaked` rows are like a trained model's: some tokens far above the rest; `flat` ones have no such."""
    logits = torch.randn(batch, VOCAB, device=device) * 3
    if kind == "peaked":
        logits[:, ::997] += 12
    return logits.bfloat16()


def run_draws(device: torch.device) -> Section:
    """Both draws of every case."""
    section = Section("draws", f"filtered rows over {VOCAB:,} tokens, bfloat16")
    draw, sort = choose_draws(device).filtered, TORCH_DRAWS.filtered
    for kind in ("peaked", "flat"):
        for batch in BATCHES:
            logits = logits_of(kind, batch, device)
            for asked, row in ASKED.items():
                case = Case.of(logits, row)
                name = f"{batch} {kind}, {asked}"
                sorting = seconds_of(partial(sort, *case), device, REPEATS)
                section.add(name, "sort", "ms", [1e3 * one for one in sorting])
                chosen = section.add(name, "draw", "ms", [1e3 * one for one in recorded_seconds(draw, case)])
                section.add(name, "launch", "ms", [1e3 * one for one in launch_seconds(draw, case)])
                if batch == max(BATCHES):
                    section.bars.append(Bar(name, BAR_MS, "ms", chosen.median, at_least=False))
    if draw is sort:
        section.notes.append("The device got the sort: see the warning.")
    section.notes.append("Draw: from a CUDA graph. Launch: the host's time of a draw without one.")
    return section


def recorded_seconds(draw: FilteredDraw, case: Case) -> list[float]:
    """What one draw takes the device."""
    device = case.logits.device

    def work() -> None:
        draw(*case)

    return seconds_of(CudaRecorder(device).record(work), device, REPEATS)


def launch_seconds(draw: FilteredDraw, case: Case) -> list[float]:
    """What one draw costs the host."""
    runs = []
    for _ in range(RUNS):
        torch.cuda.synchronize(case.logits.device)
        started = time.perf_counter()
        for _ in range(REPEATS):
            draw(*case)
        runs.append((time.perf_counter() - started) / REPEATS)
    torch.cuda.synchronize(case.logits.device)
    return runs


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_draw", description="Filtered draws.")
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This needs a CUDA device.", file=sys.stderr)
        return 2
    console, facts = Console(width=120), about()
    console.print_json(json.dumps(facts))
    section = run_draws(torch.device("cuda", torch.cuda.current_device()))
    section.show(console)
    if arguments.json is not None:
        report = report_json(facts, [section])
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
