"""The questions that a dashboard asks Prometheus, as Grafana asks them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Curve:
    """One series: its labels, and (seconds since the epoch, value) in order; values may be NaN."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class PrometheusApi:
    """The HTTP interface of the Prometheus at `url`. Blocks; raises OSError when that fails."""

    url: str

    def ask(self, path: str, **fields: object) -> Any:
        """The `data` of an answer."""
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(fields)}", timeout=TIMEOUT_S) as reply:
            return json.load(reply)["data"]

    def over_time(self, expr: str, start: float, end: float, step: float) -> list[Curve]:
        """The values of `expr` from `start` to `end`, every `step` seconds."""
        found = self.ask("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [_curve(each["metric"], each["values"]) for each in found]

    def at(self, expr: str, time: float) -> list[Curve]:
        """The values of `expr` at one moment: a point a series."""
        found = self.ask("query", query=expr, time=time)["result"]
        return [_curve(each["metric"], [each["value"]]) for each in found]


def _curve(labels: dict[str, str], points: list[tuple[float, str]]) -> Curve:
    return Curve(labels, tuple((float(at), float(value)) for at, value in points))
