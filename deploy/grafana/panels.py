"""Panels and dashboards as small records, and the JSON that Grafana (model 39, version 10.4 and newer) reads.

A record says what is particular to a panel; everything alike in all of them stands here once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "bargauge"]
Steps = tuple[tuple[str, float | None], ...]

SOURCE: Json = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
NEUTRAL: Steps = (("blue", None),)
GRID_WIDTH = 24
_MAY_BE_NONE = re.compile(r" / |histogram_quantile|job_model:")  # a quotient, also one that a rule recorded


@dataclass(frozen=True)
class Query:
    """One expression. `legend` names its series; `instant` asks only for the end of the time range."""

    expr: str
    legend: str = "__auto"
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """`steps` are colours from a value on; `lines` draws them over a time series. Sizes are in grid units."""

    kind: Kind
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    steps: Steps = NEUTRAL
    stacked: bool = False
    lines: bool = False
    top: float | None = None  # of the axis
    show_names: bool = False  # of a stat: the legend instead of the value
    empty: str = ""  # why there may be nothing to show; "" for the row's reason


@dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right and on to the next line when the width is used up.

    `empty` is what a panel of it says when there is nothing to show.
    """

    title: str
    panels: tuple[Panel, ...]
    empty: str


@dataclass(frozen=True)
class Board:
    """One dashboard. `uid` is part of its address: it never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]


def stat(title: str, description: str, unit: str, expr: str, steps: Steps = NEUTRAL) -> Panel:
    """One number with a small curve behind it; eight fit a row."""
    return Panel("stat", title, description, unit, (Query(expr, title),), width=3, height=4, steps=steps)


def lines(title: str, description: str, unit: str, *queries: Query, **more: Any) -> Panel:
    """Curves over time."""
    return Panel("timeseries", title, description, unit, queries, **more)


def heatmap(title: str, description: str, unit: str, expr: str) -> Panel:
    """How often each bucket of a histogram was hit, over time; `expr` keeps the label le."""
    return Panel("heatmap", title, description, unit, (Query(expr, "{{le}}"),))


def bars(title: str, description: str, unit: str, query: Query, **more: Any) -> Panel:
    """One bar a series, of the end of the time range."""
    return Panel("bargauge", title, description, unit, (query,), **more)


def dashboard_json(board: Board) -> Json:
    """What Grafana imports and provisions."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["slipstream"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [_links()],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": list(_laid_out(board.rows)),
    }


def _links() -> Json:
    return {
        "type": "dashboards",
        "title": "Slipstream",
        "tags": ["slipstream"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _variables() -> list[Json]:
    """Where the data comes from, and whose they are: all, unless somebody chooses."""
    source = {"name": "DS_PROMETHEUS", "type": "datasource", "label": "data source", "query": "prometheus"}
    models = "label_values(slipstream_num_requests_running, model_name)"
    instances = 'label_values(slipstream_num_requests_running{model_name=~"$model_name"}, instance)'
    return [
        {**source, "hide": 0, "refresh": 1, "regex": "", "multi": False, "includeAll": False, "options": []},
        _choice("model_name", "model", models),
        _choice("instance", "instance", instances),
    ]


def _choice(name: str, label: str, query: str) -> Json:
    everything = {"text": ["All"], "value": ["$__all"]}
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "hide": 0,
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "options": [],
        "current": everything,
    }


def _laid_out(rows: Iterable[Row]) -> Iterator[Json]:
    number, y = 1, 0
    for row in rows:
        place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        number, y, x, height = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            reasoned = panel if panel.empty else replace(panel, empty=row.empty)
            yield {"id": number, "gridPos": place, **_panel_json(reasoned)}
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height


def _panel_json(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [_target(panel, place, query) for place, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, place: int, query: Query) -> Json:
    return {
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr if panel.kind == "heatmap" else _known(query.expr),
        "legendFormat": query.legend,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": query.instant,
        "range": not query.instant,
    }


def _known(expr: str) -> str:
    """`expr` without what is no number, as 0 / 0: a panel that has nothing else then says why it is empty."""
    asks_for_more = expr.endswith(" > 0")
    return f"{expr} > -Inf" if _MAY_BE_NONE.search(expr) and not asks_for_more else expr


def _defaults(panel: Panel) -> Json:
    """How values look. A heatmap has its own options for that."""
    if panel.kind == "heatmap":
        hidden = {"legend": False, "tooltip": False, "viz": False}
        return {"noValue": panel.empty, "custom": {"hideFrom": hidden}}
    steps = [{"color": color, "value": value} for color, value in panel.steps]
    common: Json = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "mappings": [],
        "noValue": panel.empty,
        "thresholds": {"mode": "absolute", "steps": steps},
        **({} if panel.top is None else {"max": panel.top}),
    }
    if panel.kind != "timeseries":
        return common
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if panel.lines else "off"},
    }
    return {**common, "custom": custom}


def _options(panel: Panel) -> Json:
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {
            "reduceOptions": last,
            "orientation": "auto",
            "textMode": "name" if panel.show_names else "value",
            "colorMode": "value",
            "graphMode": "none" if panel.show_names else "area",
            "justifyMode": "auto",
        }
    if panel.kind == "bargauge":
        return {
            "reduceOptions": last,
            "orientation": "horizontal",
            "displayMode": "basic",
            "valueMode": "color",
            "showUnfilled": True,
        }
    if panel.kind == "heatmap":
        return _heatmap_options(panel)
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _heatmap_options(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "fill": "dark-blue",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }
