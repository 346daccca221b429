"""Drafting before the target's passes and beside them, at set acceptance and costs, against the formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tests.bench.report import Bar, Section
from tests.bench.sim_spec.cell import Cell, Rate, measure

BATCHES = {1: 1600, 16: 320}  # sequences, and the units of a run
CENTRE = (0.8, 0.2, 4)  # alpha, cost ratio, drafts: the cell that the bars on gain are for
ALPHAS, COSTS, LENGTHS = (0.5, 0.7, 0.8, 0.9), (0.05, 0.1, 0.2, 0.5), (2, 4, 8)
CORNERS = ((0.5, 0.5, 2), (0.7, 0.1, 4), (0.8, 0.1, 8), (0.9, 0.05, 8))
CELLS = tuple(
    dict.fromkeys(
        [(alpha, *CENTRE[1:]) for alpha in ALPHAS]
        + [(CENTRE[0], cost, CENTRE[2]) for cost in COSTS]
        + [(*CENTRE[:2], length) for length in LENGTHS]
        + list(CORNERS)
    )
)
_GAIN, _CLOSE = 1.2, 5.0  # async over sync, and percent from a formula
_CENTRE_SCALE = 5  # of the usual time: its bar is closer to what is due than elsewhere


@dataclass(frozen=True, slots=True)
class Row:
    """One pair at one batch size, by both schedules. `cell` is that of "async"."""

    cell: Cell
    before: Rate
    beside: Rate

    @property
    def sync(self) -> Cell:
        """The cell of "sync"."""
        return replace(self.cell, schedule="sync")

    @property
    def gain(self) -> float:
        """Async over sync."""
        return self.beside.value / self.before.value

    @property
    def misses(self) -> list[float]:
        """How far the schedules are from their formulas, in percent; only those that have one."""
        pairs = ((self.before, self.sync.formula), (self.beside, self.cell.formula))
        return [off_by(rate, formula) for rate, formula in pairs if formula is not None]


def off_by(rate: Rate, formula: float) -> float:
    """Percent by which a measured rate is above the formula."""
    return 100 * (rate.value / formula - 1)


def run_grid(cells: Iterable[tuple[float, float, int]] = CELLS, seed: int = 1) -> list[Row]:
    """Measure the cells, each row with a seed of its own: both schedules have the same luck."""
    rows = []
    for alpha, cost_ratio, max_drafts in cells:
        for num_seqs, num_units in BATCHES.items():
            beside = Cell(alpha, cost_ratio, max_drafts, num_seqs, "async")
            num_units *= _CENTRE_SCALE if (alpha, cost_ratio, max_drafts) == CENTRE else 1
            rates = [measure(cell, num_units, seed) for cell in (replace(beside, schedule="sync"), beside)]
            rows.append(Row(beside, *rates))
            seed += 1
    return rows


def grid_section(rows: Sequence[Row]) -> Section:
    """The rows as a table, with the bars."""
    section = Section("grid", "sync and async against the formulas, tokens per pass time and sequence")
    for row in rows:
        cell = row.cell
        case = f"α {cell.alpha:g} c {cell.cost_ratio:g} γ {cell.max_drafts} ×{cell.num_seqs}"
        for rate, own in ((row.before, row.sync), (row.beside, cell)):
            section.add(case, own.schedule, "", [rate.value])
            if own.formula is not None:
                section.add(case, f"{own.schedule} formula", "", [own.formula])
                section.add(case, f"{own.schedule} off by", "%", [off_by(rate, own.formula)])
            section.add(case, f"{own.schedule} s.e.", "%", [rate.error_percent])
        section.add(case, "async / sync", "x", [row.gain])
    for row in rows:
        cell = row.cell
        if (cell.alpha, cell.cost_ratio, cell.max_drafts) == CENTRE:
            name = f"async / sync, α {CENTRE[0]}, c {CENTRE[1]}, γ {CENTRE[2]}, batch {cell.num_seqs}"
            section.bars.append(Bar(name, _GAIN, "x", row.gain, at_least=True))
    furthest = max(abs(miss) for row in rows for miss in row.misses)
    section.bars.append(Bar("furthest of all from its formula", _CLOSE, "%", furthest, at_least=False))
    section.notes += [
        "α acceptance, c micro-step over pass, γ drafts, × sequences; off is 1; s.e. is the standard error",
        "sync formula E/(1 + γc), async formula E/(1 + α - α^(γ+1)), E = (1 - α^(γ+1))/(1 - α)",
        "async has no formula where c(γ+1) > 1: γ+1 drafts do not fit into a pass, so the tape is not filled",
    ]
    return section
