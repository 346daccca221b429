"""Output, time of a step and the host's share of it by batch size, a line for each context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Point = tuple[int, int, float, float]  # batch, context, seconds of a step, share around the model


def plot_scale(points: Sequence[Point], folder: Path) -> Path:
    """Draw the points into `folder`, which is made; the file written."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    output, step, share = figure.subplots(1, 3)
    _draw(output, points, "tokens/s", lambda point: point[0] / point[2])
    _draw(step, points, "step, ms", lambda point: 1e3 * point[2])
    _draw(share, points, "host and sampling, % of a step", lambda point: 100 * point[3])
    for axes in (output, step):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    output.legend(title="context")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scale.png"
    figure.savefig(path, dpi=120)
    return path


def _draw(axes: Axes, points: Sequence[Point], label: str, value: Callable[[Point], float]) -> None:
    for context in sorted({point[1] for point in points}):
        own = sorted(point for point in points if point[1] == context)
        axes.plot(
            [point[0] for point in own], [value(point) for point in own], marker="o", label=str(context)
        )
    batches = sorted({point[0] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, labels=[str(batch) for batch in batches], minor=False)
    axes.set(xlabel="sequences decoding", ylabel=label)
    axes.grid(visible=True, alpha=0.3)
