"""What the server chooses by itself, against the best that could be set: draft lengths and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tests.bench.report import Bar, Section
from tests.bench.sim_spec.cell import Cell, Rate, measure

Fixed = Literal["off", "sync", "async"]

LONGEST = 8  # drafts that a length policy may choose
LEARNING = 100  # units before its figures count
LENGTH_CASES: tuple[tuple[float, float, Fixed], ...] = (
    (0.8, 0.2, "sync"),
    (0.9, 0.05, "sync"),
    (0.5, 0.2, "sync"),
    (0.8, 0.2, "async"),
    (0.9, 0.05, "async"),
)
LENGTH_UNITS = {1: 8960, 16: 1600}  # for a standard error of less than one percent
SCHEDULES: tuple[Fixed, ...] = ("off", "sync", "async")
SCHEDULE_CASES = {  # by what should be chosen: alpha, cost ratio, slow-down
    "async": (0.8, 0.2, 1.0),
    "sync": (0.8, 0.2, 1.4),
    "off": (0.5, 0.5, 1.5),
}
SCHEDULE_UNITS = {1: 2400, 16: 640}  # long enough for the trials of the schedules to be a small part
_AT_LEAST = 0.95  # of the best


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """`auto` and, by schedule, what each gives when it is set."""

    auto: Rate
    rates: dict[Fixed, Rate]
    formulas: dict[Fixed, float | None]

    @property
    def share(self) -> float:
        """Of the best schedule's rate: by formula where there is one, since that has no error."""
        return self.auto.value / max(self.formulas[name] or rate.value for name, rate in self.rates.items())

    @property
    def chosen(self) -> str:
        """The schedule of most passes."""
        return max(self.auto.passes, key=self.auto.passes.__getitem__)


def choose_schedule(expected: str, num_seqs: int, num_units: int, seed: int) -> ScheduleChoice:
    """Measure the case in which this schedule should be chosen."""
    alpha, cost_ratio, slowdown = SCHEDULE_CASES[expected]
    auto = Cell(alpha, cost_ratio, 4, num_seqs, "auto", slowdown)
    cells = {name: replace(auto, schedule=name) for name in SCHEDULES}
    rates = {name: measure(cell, num_units, seed + i) for i, (name, cell) in enumerate(cells.items(), 1)}
    formulas = {name: cell.formula for name, cell in cells.items()}
    return ScheduleChoice(measure(auto, num_units, seed), rates, formulas)


def run_schedules(seed: int = 101, cases: Sequence[str] = tuple(SCHEDULE_CASES)) -> Section:
    """`auto` in cells that each have another best schedule."""
    section = Section("schedules", "auto against the schedules, γ 4, tokens per pass time and sequence")
    shares = []
    for expected in cases:
        alpha, cost_ratio, slowdown = SCHEDULE_CASES[expected]
        for num_seqs, num_units in SCHEDULE_UNITS.items():
            case = f"α {alpha:g} c {cost_ratio:g} σ {slowdown:g} ×{num_seqs}"
            choice = choose_schedule(expected, num_seqs, num_units, seed)
            seed += len(SCHEDULES) + 1
            for name, rate in choice.rates.items():
                section.add(case, name, "", [rate.value])
            section.add(case, "auto", "", [choice.auto.value])
            section.add(case, "auto s.e.", "%", [choice.auto.error_percent])
            section.add(case, "auto / best", "", [choice.share])
            section.add(case, "passes in the best", "%", [100 * choice.auto.passes.get(expected, 0.0)])
            shares.append(choice.share)
    section.bars.append(Bar("auto / best schedule, least", _AT_LEAST, "", min(shares), at_least=True))
    section.notes.append(
        "σ: the target's pass takes so many times as long while the drafter is out; the best is taken by "
        "formula where there is one; the trials of the other schedules are in auto's figures"
    )
    return section


def run_lengths(seed: int = 201) -> Section:
    """The goodput policy against the best length that never changes."""
    section = Section(
        "lengths", f"goodput, up to {LONGEST} drafts, against the best fixed length, tokens as above"
    )
    shares = []
    for alpha, cost_ratio, schedule in LENGTH_CASES:
        for num_seqs, num_units in LENGTH_UNITS.items():
            case = f"α {alpha:g} c {cost_ratio:g} {schedule} ×{num_seqs}"
            cell = Cell(alpha, cost_ratio, LONGEST, num_seqs, schedule, policy="goodput")
            best = best_fixed(cell)
            free = measure(cell, num_units, seed, warm_up=LEARNING)
            fixed = measure(best, num_units, seed + 1)
            seed += 2
            assert best.formula is not None
            share = free.value / best.formula
            section.add(case, "goodput", "", [free.value])
            section.add(case, "goodput s.e.", "%", [free.error_percent])
            section.add(case, "best γ", "", [best.max_drafts])
            section.add(case, "with it", "", [fixed.value])
            section.add(case, "formula", "", [best.formula])
            section.add(case, "goodput / formula", "", [share])
            shares.append(share)
    section.bars.append(Bar("goodput / best fixed length, least", _AT_LEAST, "", min(shares), at_least=True))
    section.notes.append(f"the first {LEARNING} passes, in which it learns, are not counted")
    return section


def best_fixed(cell: Cell) -> Cell:
    """The cell with the best length by formula, of those that have one, verified always."""
    fixed = [replace(cell, max_drafts=count, policy="fixed") for count in range(1, cell.max_drafts + 1)]
    return max(fixed, key=lambda own: own.formula or 0.0)
