"""What every benchmark hands back, and how it is shown: measurements, bars, tables, JSON.

A figure is kept as the list of its runs; only showing it takes a median. Nothing here measures anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

BUSY_PERCENT = 20.0  # of a core, taken by others: more than this disturbs a machine of two


@dataclass(frozen=True, slots=True)
class Measurement:
    """One quantity of one case, in `unit`, once a run. No runs: it did not finish."""

    case: str
    quantity: str
    unit: str
    runs: tuple[float, ...]

    @property
    def median(self) -> float | None:
        """The middle run, None when nothing finished."""
        return statistics.median(self.runs) if self.runs else None

    def shown(self) -> str:
        """`median [min-max]`, the figure alone when there was one run, or that it did not finish."""
        if self.median is None:
            return "not finished"
        if len(self.runs) == 1:
            return figure(self.median)
        return f"{figure(self.median)} [{figure(min(self.runs))}-{figure(max(self.runs))}]"

    def to_json(self) -> Json:
        """Everything known, runs included."""
        return {
            "case": self.case,
            "quantity": self.quantity,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.runs, default=None),
            "max": max(self.runs, default=None),
            "runs": list(self.runs),
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit that was set in advance, and what was measured; `at_least` says which side is good.

    `measured` None means that there is no figure, which never meets a bar. `bound_only` means that the true
    figure is at least as good as `measured`, because the other side was stopped before it finished.
    """

    name: str
    limit: float
    unit: str
    measured: float | None
    at_least: bool
    bound_only: bool = False

    @property
    def met(self) -> bool:
        """True when the measured value is on the good side of the limit, or on it."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def shown_limit(self) -> str:
        """The limit with its direction and unit."""
        return f"{'≥' if self.at_least else '≤'} {figure(self.limit)} {self.unit}".rstrip()

    def shown_measured(self) -> str:
        """The measured value with its unit; `>` in front of a bound."""
        if self.measured is None:
            return "no figure"
        return f"{'> ' if self.bound_only else ''}{figure(self.measured)} {self.unit}".rstrip()

    def to_json(self) -> Json:
        """Limit, value and verdict."""
        return {
            "bar": self.name,
            "limit": self.limit,
            "direction": "at least" if self.at_least else "at most",
            "unit": self.unit,
            "measured": self.measured,
            "bound_only": self.bound_only,
            "met": self.met,
        }


@dataclass(slots=True)
class Section:
    """All one benchmark found. `notes` say what a reader must know to trust a figure."""

    name: str
    title: str
    measurements: list[Measurement] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    other_cpu_percent: float | None = None  # of one core, taken by processes that are not ours

    def add(self, case: str, quantity: str, unit: str, runs: Iterable[float]) -> Measurement:
        """Keep one measurement and return it."""
        measurement = Measurement(case, quantity, unit, tuple(runs))
        self.measurements.append(measurement)
        return measurement

    def to_json(self) -> Json:
        """The section as plain data."""
        return {
            "title": self.title,
            "measurements": [measurement.to_json() for measurement in self.measurements],
            "bars": [bar.to_json() for bar in self.bars],
            "notes": self.notes,
            "other_cpu_percent_of_a_core": self.other_cpu_percent,
        }

    def show(self, console: Console) -> None:
        """Print the table of figures, then the bars, then the notes."""
        console.print(Text(f"{self.name}: {self.title}", "bold"), soft_wrap=True)
        console.print(self._figures())
        if self.bars:
            console.print(bars_table(self.bars))
        for note in self.notes:
            console.print(Text(f"  {note}", style="dim"), soft_wrap=True)
        if self.other_cpu_percent is not None:
            busy = self.other_cpu_percent > BUSY_PERCENT
            advice = ": too much to trust the figures, measure again" if busy else ""
            line = f"  CPU taken by others: {self.other_cpu_percent:.0f} % of a core{advice}"
            console.print(Text(line, "bold red" if busy else "dim"), soft_wrap=True)
        console.print()

    def _figures(self) -> Table:
        """One row a case, one column a quantity."""
        columns = list(dict.fromkeys((m.quantity, m.unit) for m in self.measurements))
        cells = {(m.case, m.quantity, m.unit): m.shown() for m in self.measurements}
        table = Table("case")
        for quantity, unit in columns:
            table.add_column(f"{quantity}\n{unit}", justify="right")
        for case in dict.fromkeys(m.case for m in self.measurements):
            table.add_row(case, *(cells.get((case, *column), "") for column in columns))
        return table


def bars_table(bars: Sequence[Bar]) -> Table:
    """Each bar with its measured value and verdict."""
    table = Table("bar", "limit", "measured", "")
    for bar in bars:
        verdict = Text("met", "green") if bar.met else Text("not met", "bold red")
        table.add_row(bar.name, bar.shown_limit(), bar.shown_measured(), verdict)
    return table


def figure(value: float) -> str:
    """A number with three significant digits, or all of its integer digits when there are more."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def report_json(about: Mapping[str, object], sections: Sequence[Section]) -> Json:
    """The whole report as plain data."""
    return {**about, "sections": {section.name: section.to_json() for section in sections}}
