"""What a training run shows: a live bar a stage, lines where there is no terminal, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_LINE_EVERY_S = 15.0
_TITLES = {
    "ask": "the model writes prompts",
    "generate": "the model answers prompts",
    "features": "the model reads its answers",
    "train": "the drafter learns",
    "evaluate": "the drafter is judged",
}


class Display:
    """Shows how far a run is, on stderr, and carries the wish to end it. Enter it while the run lasts."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line = -_LINE_EVERY_S
        self._stopped = False

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stop(self) -> None:
        """Ask the run to keep what it has and end. Safe in a signal handler."""
        self._stopped = True

    def is_stopped(self) -> bool:
        """True once asked."""
        return self._stopped

    def update(self, stage: str, done: float, total: float, note: str) -> None:
        """Move the stage's bar; without a terminal print a line now and then."""
        if not self._console.is_terminal:
            self._print_line(stage, done / total, note)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(_TITLES.get(stage, stage), note=note)
        self._progress.update(self._tasks[stage], completed=done, total=total, note=note)

    def _print_line(self, stage: str, part: float, note: str) -> None:
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            title = _TITLES.get(stage, stage)
            self._console.print(f"{title}: {min(1.0, part):.0%}, {note}", highlight=False, soft_wrap=True)


def show_medusa_report(report: Mapping[str, Any], output: Path) -> None:
    """Print the tables of a report on Medusa heads on stdout, and where things are."""
    _show(report, output, "heads", _accuracy_table(report), _steps_table(report))


def show_drafter_report(report: Mapping[str, Any], output: Path) -> None:
    """Print the table of a report on a drafter of one layer on stdout, and where things are."""
    _show(report, output, "the drafter", _guesses_table(report))


def _show(report: Mapping[str, Any], output: Path, product: str, *tables: Table) -> None:
    console = Console()
    for table in tables:
        console.print(table)
    seconds = ", ".join(f"{stage} {value:.0f} s" for stage, value in report["seconds"].items())
    console.print(
        f"{report['num_train_tokens']:,} tokens to learn from, {report['num_judged_tokens']:,} others to "
        f"judge by; {product} can guess {report['coverage']:.1%} of them. {seconds}.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"What was trained is in {output}", highlight=False, soft_wrap=True)


def _guesses_table(report: Mapping[str, Any]) -> Table:
    table = Table(
        "requests", "", title="Guesses in a row: right where those before were, and accepted in all"
    )
    depth = max(len(found["right"]) for found in report["guesses"].values())
    for place in range(depth):
        table.add_column(str(place + 1), justify="right")
    for kind, found in report["guesses"].items():
        table.add_row(kind, "right", *(f"{share:.1%}" for share in found["right"]))
        table.add_row("", "accepted", *(f"{count:.2f}" for count in found["accepted"]))
        table.add_section()
    return table


def _accuracy_table(report: Mapping[str, Any]) -> Table:
    table = Table("requests", "head", title="How often the right token is among a head's first guesses")
    for top in report["shown_tops"]:
        table.add_column(f"top {top}", justify="right")
    for kind, heads in report["accuracy"].items():
        for head, shares in enumerate(heads, 1):
            table.add_row(kind if head == 1 else "", str(head), *(f"{share:.1%}" for share in shares))
        table.add_section()
    return table


def _steps_table(report: Mapping[str, Any]) -> Table:
    table = Table("requests", "heads", title="Tokens a step, by number of drafts (chain: one a head)")
    trained, untrained = report["tokens_per_step"], report["untrained_tokens_per_step"]
    counts = list(dict.fromkeys(count for kind in trained.values() for count in kind))
    for count in counts:
        table.add_column(count, justify="right")
    for kind in trained:
        for name, found in (("trained", trained[kind]), ("untrained", untrained.get(kind, {}))):
            shown = (f"{found[count]:.2f}" if count in found else "" for count in counts)
            table.add_row(kind if name == "trained" else "", name, *shown)
    return table
