"""Draws the dashboards as pictures, from what Prometheus answers to their own expressions.

`python -m deploy.grafana.render --prometheus URL --minutes 5` writes pictures/*.png. Needs the extra `plot`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deploy.grafana.drawing import FAINT, INK, Data, draw
from deploy.grafana.panels import GRID_WIDTH, Json
from deploy.grafana.prometheus_api import Curve, PrometheusApi

HERE = Path(__file__).parent
NUM_POINTS = 240
WIDTH_IN, UNIT_IN, HEAD_IN = 15.0, 0.27, 0.62
DPI = 85
_MARGINS = {  # inches from a card's edges to what is drawn: left, right, top, bottom
    "timeseries": (0.64, 0.12, 0.32, 0.66),
    "heatmap": (0.64, 0.12, 0.32, 0.28),
    "bargauge": (1.6, 0.1, 0.32, 0.1),
    "stat": (0.1, 0.1, 0.3, 0.05),
}


@dataclass(frozen=True)
class Span:
    """The time that pictures show, in seconds since the epoch, and how often Prometheus scraped in it."""

    start: float
    end: float
    scrape_s: float

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max((self.end - self.start) / NUM_POINTS, 1.0)

    def fill_in(self, expr: str) -> str:
        """`expr` for all models and instances, with the windows that Grafana would take."""
        window = max(self.step + self.scrape_s, 4 * self.scrape_s)
        windows = {"$__rate_interval": f"{window:.0f}s", "$__range": f"{self.end - self.start:.0f}s"}
        for name, value in {**windows, "$model_name": ".+", "$instance": ".+"}.items():
            expr = expr.replace(name, value)
        return expr


def draw_dashboard(board: Json, api: PrometheusApi, span: Span, path: Path) -> None:
    """Write the picture of `board` over `span` to `path`. Raises OSError when Prometheus does not answer."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    height = rows * UNIT_IN + HEAD_IN
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="#f4f5f7")
    figure.text(0.008, 1 - 0.24 / height, board["title"], fontsize=15, weight="bold", color=INK, va="center")
    figure.text(0.008, 1 - 0.48 / height, board["description"], fontsize=8.5, color=FAINT, va="center")
    for panel in board["panels"]:
        left, top, width, tall = _place(panel)
        if panel["type"] == "row":
            y = 1 - (top + tall / 2) / height
            figure.text(0.008, y, panel["title"], fontsize=9, weight="bold", va="center")
            continue
        card = (left / WIDTH_IN, 1 - (top + tall) / height)
        size = (width / WIDTH_IN, tall / height)
        figure.add_artist(Rectangle(card, *size, facecolor="white", edgecolor="#dfe3e8", lw=0.8, zorder=-1))
        title_y = 1 - (top + 0.15) / height
        figure.text(
            card[0] + 0.006, title_y, panel["title"], fontsize=8, weight="bold", va="center", color=INK
        )
        axes = figure.add_axes(_inside(panel, height))
        _style(axes)
        draw(axes, panel, _ask(panel, api, span))
    figure.savefig(path, pil_kwargs={"optimize": True})


def _place(panel: Json) -> tuple[float, float, float, float]:
    """Left, top, width and height of a card, in inches, with a little air around it."""
    place, unit, air = panel["gridPos"], WIDTH_IN / GRID_WIDTH, 0.05
    left, top = place["x"] * unit + air, place["y"] * UNIT_IN + HEAD_IN + air
    return left, top, place["w"] * unit - 2 * air, place["h"] * UNIT_IN - 2 * air


def _inside(panel: Json, height: float) -> tuple[float, float, float, float]:
    """Where the axes lie, in shares of the figure."""
    x, y, width, tall = _place(panel)
    left, right, top, bottom = _MARGINS[panel["type"]]
    return (
        (x + left) / WIDTH_IN,
        1 - (y + tall - bottom) / height,
        (width - left - right) / WIDTH_IN,
        (tall - top - bottom) / height,
    )


def _style(axes: Any) -> None:
    axes.set_facecolor("white")
    axes.tick_params(labelsize=6.5, length=0, colors="#5a6472")
    axes.grid(visible=True, color="#eceff2", lw=0.7)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _ask(panel: Json, api: PrometheusApi, span: Span) -> Data:
    """The curves of all of a panel's expressions on the same times; what never was a number is left out."""
    times = np.arange(span.start, span.end + span.step / 2, span.step)
    curves = []
    for target in panel["targets"]:
        expr = span.fill_in(target["expr"])
        if target["instant"]:
            found = api.at(expr, span.end)
        else:
            found = api.over_time(expr, span.start, span.end, span.step)
        for curve in found:
            values = _on_times(curve, times)
            if np.isfinite(values).any():
                curves.append((_name(target["legendFormat"], curve, panel["title"]), values))
    return Data(times - span.start, curves)


def _on_times(curve: Curve, times: Any) -> Any:
    """NaN where Prometheus had nothing; a single point stands for the last time."""
    values = np.full(len(times), np.nan)
    for at, value in curve.points:
        values[int(np.abs(times - at).argmin())] = value if np.isfinite(value) else np.nan
    return values


def _name(pattern: str, curve: Curve, title: str) -> str:
    if pattern == "__auto":
        return title
    return re.sub(r"\{\{(\w+)\}\}", lambda match: curve.labels.get(match[1], ""), pattern)


def _boards() -> Iterator[tuple[str, Json]]:
    for path in sorted((HERE / "dashboards").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description="Draw the dashboards from a running Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back to look")
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="its scrape interval")
    parser.add_argument("--folder", type=Path, default=HERE / "pictures", help="where the pictures go")
    arguments = parser.parse_args()
    end = time.time()
    span = Span(end - 60 * arguments.minutes, end, arguments.scrape_seconds)
    arguments.folder.mkdir(exist_ok=True)
    for name, board in _boards():
        path = arguments.folder / f"{name}.png"
        draw_dashboard(board, PrometheusApi(arguments.prometheus), span, path)
        print(f"{path}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
