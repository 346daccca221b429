"""Measured points on the curves of the formulas, by acceptance, cost and length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.bench.sim_spec.cell import Cell, Rate
from tests.bench.sim_spec.grid import CENTRE, Row

_COLOURS: dict[Literal["sync", "async"], str] = {"sync": "tab:blue", "async": "tab:orange"}
_MARKERS = {1: "o", 16: "x"}
_AXES: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("alpha", "acceptance α", [0.4 + 0.01 * i for i in range(56)]),
    ("cost_ratio", "cost ratio c", [0.01 * i for i in range(1, 56)]),
    ("max_drafts", "drafts γ", range(1, 10)),
)


def plot_grid(rows: Sequence[Row], folder: Path) -> Path:
    """Draw the rows through the centre of the grid into `folder`; the file written."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    centre = Cell(*CENTRE, num_seqs=1, schedule="async")
    for axes, (name, label, values) in zip(figure.subplots(1, 3), _AXES, strict=True):
        on_line = [row for row in rows if _is_on_line(row.cell, centre, name)]
        for schedule, colour in _COLOURS.items():
            cells = [_with(replace(centre, schedule=schedule), name, value) for value in values]
            known = [(value, c.formula) for value, c in zip(values, cells, strict=True) if c.formula]
            axes.plot(*zip(*known, strict=True), color=colour, label=f"{schedule}, formula")
        _points(axes, on_line, "sync", name, lambda row: row.before)
        _points(axes, on_line, "async", name, lambda row: row.beside)
        axes.set(xlabel=label, ylabel="tokens per pass time")
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle("else α {:g}, c {:g}, γ {}; bars are two standard errors".format(*CENTRE))
    path = folder / "speculation.png"
    figure.savefig(path, dpi=120)
    return path


def _is_on_line(cell: Cell, centre: Cell, name: str) -> bool:
    """True if the cell differs from the centre in nothing else."""
    return _with(replace(cell, num_seqs=1), name, getattr(centre, name)) == centre


def _with(cell: Cell, name: str, value: Any) -> Cell:
    return replace(cell, **{name: value})


def _points(
    axes: Axes,
    rows: Iterable[Row],
    schedule: Literal["sync", "async"],
    name: str,
    rate_of: Callable[[Row], Rate],
) -> None:
    for num_seqs, marker in _MARKERS.items():
        own = [row for row in rows if row.cell.num_seqs == num_seqs]
        if own:
            axes.errorbar(
                [getattr(row.cell, name) for row in own],
                [rate_of(row).value for row in own],
                yerr=[2 * rate_of(row).error for row in own],
                fmt=marker,
                color=_COLOURS[schedule],
                label=f"{schedule}, batch {num_seqs}",
            )
