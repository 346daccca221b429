"""Latency against load, one plot a quantity and one line a policy."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.bench.report import Section
from tests.bench.sim.policies import LOADS, POLICIES, QUANTITIES


def plot_sweep(sweep: Section, folder: Path) -> list[Path]:
    """Draw what `run_sweep` found into `folder`; the files written."""
    values = {(m.case, m.quantity): m.median for m in sweep.measurements}
    paths = []
    for quantity in QUANTITIES:
        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for policy, marker in zip(POLICIES, "osv^Dx", strict=True):
            line = [values[f"{policy}, load {load:.0%}", quantity] or 0.0 for load in LOADS]
            axes.plot([100 * load for load in LOADS], line, marker=marker, label=policy)
        axes.set(title=sweep.title, xlabel="load, % of capacity", ylabel=f"{quantity}, s", yscale="log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        paths.append(folder / f"{quantity.lower().replace(' ', '_')}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths
