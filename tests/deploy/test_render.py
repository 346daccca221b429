"""Pictures of dashboards: numbers as people read them, every kind of panel, files small enough for a page."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.panels import Board, Query, Row, bars, dashboard_json, heatmap, lines, stat
from deploy.grafana.prometheus_api import Curve, PrometheusApi
from deploy.grafana.render import Span, draw_dashboard
from deploy.grafana.units import written
from tests.deploy.dashboards import GRAFANA, NAMES, load, panels

SPAN = Span(start=1000.0, end=1240.0, scrape_s=5.0)
BOARD = Board(
    "slipstream-test",
    "All kinds",
    "One of each.",
    (
        Row(
            "Row",
            (
                stat("Number", "d", "s", "number", (("green", None), ("red", 2.0))),
                lines("Lines", "d", "percentunit", Query("lines", "{{who}}"), top=1.0, lines=True),
                lines("Layers", "d", "count:tok/s", Query("lines", "{{who}}"), stacked=True),
                heatmap("Heat", "d", "s", "heat[$__rate_interval]"),
                bars("Bars", "d", "percentunit", Query("bars", "{{who}}", instant=True)),
                lines("Nothing", "d", "short", Query("nothing")),
                lines("Never", "d", "short", Query("never"), empty="Nobody asked for it."),
            ),
            "No request came.",
        ),
    ),
)


@dataclass(frozen=True)
class FakePrometheus(PrometheusApi):
    """Answers by the first word of an expression."""

    url: str = ""
    asked: list[str] = field(default_factory=list)

    def over_time(self, expr: str, start: float, end: float, step: float) -> list[Curve]:
        self.asked.append(expr)
        times = [start + step * place for place in range(int((end - start) / step) + 1)]
        if expr == "number":
            return [Curve({}, tuple((at, math.nan if at < 1100 else 1.5) for at in times))]
        if expr == "lines":
            return [Curve({"who": who}, tuple((at, 0.4) for at in times)) for who in ("a", "b")]
        if expr.startswith("heat"):
            counts = {"0.1": 1.0, "0.5": 4.0, "+Inf": 4.0}
            return [Curve({"le": le}, tuple((at, n) for at in times)) for le, n in counts.items()]
        return []

    def at(self, expr: str, time: float) -> list[Curve]:
        self.asked.append(expr)
        return [Curve({"who": "a"}, ((time, 0.7),))]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.0, "s", "0 s"),
        (4e-5, "s", "40 µs"),
        (90, "s", "1.5 min"),
        (0.5, "percentunit", "50 %"),
        (1234567, "short", "1.23 M"),
        (3 * 2**30, "bytes", "3 GiB"),
        (250.4, "count:tok/s", "250 tok/s"),
        (100, "short", "100"),
        (math.nan, "s", "–"),
    ],
)
def test_numbers_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_every_unit_of_the_dashboards_can_be_written() -> None:
    units = {
        panel["fieldConfig"]["defaults"].get("unit", "short")
        for name in NAMES
        for panel in panels(load(name))
    }
    assert len(units) > 5
    assert all(written(1.0, unit) for unit in units)


def test_every_kind_of_panel_is_drawn(tmp_path: Path) -> None:
    api = FakePrometheus()
    draw_dashboard(dashboard_json(BOARD), api, SPAN, tmp_path / "board.png")
    assert api.asked == ["number", "lines", "lines", "heat[20s]", "bars", "nothing", "never"]
    assert _size(tmp_path / "board.png")[0] == 1275


def test_an_empty_panel_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    written_out: list[str] = []
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **_: written_out.append(s))
    draw_dashboard(dashboard_json(BOARD), FakePrometheus(), SPAN, tmp_path / "board.png")
    assert written_out[-2:] == ["No request came.", "Nobody asked for it."]


@pytest.mark.parametrize("name", NAMES)
def test_each_dashboard_has_a_picture_that_a_page_can_carry(name: str) -> None:
    path = GRAFANA / "pictures" / f"{name}.png"
    width, height = _size(path)
    assert (width, 500 < height < 3000) == (1275, True)
    assert path.stat().st_size <= 250 * 1024


def test_windows_are_those_that_grafana_takes() -> None:
    assert (
        SPAN.fill_in("rate(a[$__rate_interval]) + increase(b[$__range])")
        == "rate(a[20s]) + increase(b[240s])"
    )
    wide = Span(0, 240 * 60, 5.0)
    assert wide.fill_in('a{instance=~"$instance"}[$__rate_interval]') == 'a{instance=~".+"}[65s]'


def _size(path: Path) -> Any:
    """Width and height from a PNG's head."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])
