"""Draws one panel with matplotlib, near to how Grafana shows it. Needs the extra `plot`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.grafana.panels import Json
from deploy.grafana.units import written

Values = npt.NDArray[np.float64]
Named = Sequence[tuple[str, Values]]  # what a legend calls it, and a value for each of the times

PALETTE = (
    *("#3871dc", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#1f9fae"),
    *("#b8860b", "#7d8b99", "#ad0063", "#6b8e23"),
)
NAMED = {"green": "#37872d", "orange": "#e0752d", "red": "#c4162a", "blue": "#3871dc"}
INK, FAINT = "#24292e", "#8a929c"
MAX_NAMES = 12
NAME_CHARACTERS = 28  # beside a bar
REASON_CHARACTERS = {"stat": 22, "timeseries": 52, "heatmap": 52, "bargauge": 40}  # in a line
LEGEND_CHARACTERS = 62  # in a line under a panel of eight units


_TIME_STEPS = (10, 30, 60, 120, 300, 600, 1800, 3600, 86400)  # seconds between two marks


@dataclass(frozen=True)
class Data:
    """What a panel's expressions gave: `times` in seconds since the start, and the named curves."""

    times: Values
    curves: Named


def draw(axes: Any, panel: Json, data: Data) -> None:
    """Draw `panel` into `axes`."""
    if not data.curves:
        axes.set_axis_off()
        reason = textwrap.fill(panel["fieldConfig"]["defaults"]["noValue"], REASON_CHARACTERS[panel["type"]])
        axes.text(
            *(0.5, 0.5, reason),
            ha="center",
            va="center",
            color=FAINT,
            fontsize=8,
            transform=axes.transAxes,
        )
        return
    {"timeseries": _lines, "stat": _number, "heatmap": _heat, "bargauge": _bars}[panel["type"]](
        axes, panel, data
    )


def _lines(axes: Any, panel: Json, data: Data) -> None:
    field = panel["fieldConfig"]["defaults"]
    custom, unit = field["custom"], field["unit"]
    shown = data.curves[:MAX_NAMES]
    if custom["stacking"]["mode"] == "normal":
        heights = [np.nan_to_num(values) for _, values in shown]
        colors = [_color(place) for place in range(len(shown))]
        axes.stackplot(
            data.times, heights, labels=[name for name, _ in shown], colors=colors, alpha=0.75, lw=0
        )
        top = float(np.max(np.sum(heights, axis=0)))
    else:
        for place, (name, values) in enumerate(shown):
            axes.plot(data.times, values, color=_color(place), label=name, lw=1.2)
            if len(shown) == 1:
                axes.fill_between(data.times, values, color=_color(place), alpha=0.08, lw=0)
        top = max((float(np.nanmax(values)) for _, values in shown if np.isfinite(values).any()), default=0)
    top = max(top * 1.12, field.get("max", 0.0)) or 1.0
    if custom["thresholdsStyle"]["mode"] == "dashed":
        for step in field["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] <= top:
                axes.axhline(step["value"], color=NAMED[step["color"]], ls="--", lw=0.8, alpha=0.8)
    axes.set(ylim=(0, top), xlim=(data.times[0], data.times[-1]))
    _time_axis(axes)
    axes.yaxis.set_major_formatter(lambda value, _: written(value, unit))
    axes.set_yticks(_ticks(top, unit))
    _legend(axes, shown)


def _number(axes: Any, panel: Json, data: Data) -> None:
    field = panel["fieldConfig"]["defaults"]
    name, values = data.curves[0]
    finite = values[np.isfinite(values)]
    last = float(finite[-1]) if finite.size else math.nan
    color = _threshold_color(field["thresholds"]["steps"], last)
    as_name = panel["options"]["textMode"] == "name"
    text = name if as_name else written(last, field["unit"])
    axes.set_axis_off()
    axes.text(
        0.02, 0.72, text, color=color, fontsize=15, weight="bold", transform=axes.transAxes, va="center"
    )
    if not as_name and finite.size > 1:
        top = float(finite.max()) or 1.0
        axes.plot(data.times, values, color=color, lw=1)
        axes.fill_between(data.times, values, color=color, alpha=0.15, lw=0)
        axes.set(xlim=(data.times[0], data.times[-1]), ylim=(0, top * 2.4))


def _heat(axes: Any, panel: Json, data: Data) -> None:
    """Buckets count everything below their bound: what one holds is what it has more than the one before."""
    from matplotlib.colors import PowerNorm

    buckets = sorted((float(name), np.nan_to_num(values)) for name, values in data.curves)
    bounds = [bound for bound, _ in buckets]
    held = np.diff([values for _, values in buckets], axis=0, prepend=0.0).clip(min=0)
    hit = np.flatnonzero(held.sum(axis=1) > 0)
    low, high = (max(int(hit[0]) - 1, 0), int(hit[-1]) + 1) if hit.size else (0, len(bounds))
    held, bounds = held[low : high + 1], bounds[low : high + 1]
    axes.pcolormesh(
        data.times,
        np.arange(len(bounds) + 1),
        held[:, 1:],
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0, vmax=max(float(held.max()), 1.0)),
    )
    unit = panel["options"]["yAxis"]["unit"]
    every = max(1, round(len(bounds) / 6))
    places = range(every, len(bounds) + 1, every)
    axes.set_yticks(list(places), [written(bounds[place - 1], unit) for place in places])
    _time_axis(axes)
    axes.grid(visible=False)


def _bars(axes: Any, panel: Json, data: Data) -> None:
    field = panel["fieldConfig"]["defaults"]
    shown = [(name, float(values[-1])) for name, values in data.curves[:MAX_NAMES]][::-1]
    top = field.get("max") or max(value for _, value in shown) or 1.0
    for place, (_, value) in enumerate(shown):
        color = _threshold_color(field["thresholds"]["steps"], value)
        axes.barh(place, top, color="#eef0f3", height=0.62)
        axes.barh(place, value, color=color, height=0.62, alpha=0.85)
        text = written(value, field["unit"])
        axes.text(top * 1.02, place, text, va="center", fontsize=6.5, color=INK)
    axes.set_yticks(range(len(shown)), [_shortened(name) for name, _ in shown])
    axes.set(xlim=(0, top * 1.16), xticks=[])
    axes.grid(visible=False)


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"{name[: NAME_CHARACTERS - 1]}…"


def _color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _threshold_color(steps: Sequence[Json], value: float) -> str:
    """That of the last step which `value` has reached."""
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED[reached[-1]]


def _ticks(top: float, unit: str) -> list[float]:
    """From 0 to `top` in steps that are round in what they are written in: minutes, mebibytes."""
    from matplotlib.ticker import MaxNLocator

    size = 1.0
    if unit == "s" and top >= 120:
        size = 60.0
    elif unit == "bytes" and top >= 1:
        size = 1024.0 ** int(math.log(top, 1024))
    return [
        size * tick
        for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, top / size)
        if size * tick <= top
    ]


def _time_axis(axes: Any) -> None:
    from matplotlib.ticker import MultipleLocator

    seconds = axes.get_xlim()[1]
    axes.xaxis.set_major_locator(MultipleLocator(next(each for each in _TIME_STEPS if seconds <= 7 * each)))
    axes.xaxis.set_major_formatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02d}")


def _legend(axes: Any, shown: Named) -> None:
    """Three lines at most, of the curves that can be told from the axis, when there are some."""
    handles, names = axes.get_legend_handles_labels()
    seen = [place for place, (_, values) in enumerate(shown) if np.nansum(values)] or list(range(len(shown)))
    per_line = max(1, LEGEND_CHARACTERS // (max(len(names[place]) for place in seen) + 6))
    seen = seen[: 3 * per_line]
    axes.legend(
        [handles[place] for place in seen],
        [names[place] for place in seen],
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.1),
        ncols=min(per_line, len(seen)),
        fontsize=6.5,
        frameon=False,
        handlelength=1.1,
        columnspacing=1.1,
        labelcolor=INK,
        borderpad=0,
    )
