"""The names that dashboards, alerts and scripts are written against, as a file.

`python -m tests.support.metrics_golden` writes it anew: a promise broken to all of them, unless it only adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from engine import Engine
from server.http.context import ServerContext
from server.observability.figure_history import FigureHistory
from server.observability.http_metrics import HttpMetrics
from server.observability.metrics import PREFIX, MetricsPage
from tests.e2e.http_server import make_settings
from tests.support.fake_engine import FakeEngine

GOLDEN = Path(__file__).parents[1] / "unit" / "server" / "observability" / "metrics_golden.txt"
HEAD = "# family, type, labels and a histogram's bounds; renewed by python -m tests.support.metrics_golden\n"


def make_context(engine: FakeEngine | None = None) -> ServerContext:
    """An application's, with nothing counted yet."""
    served, http = cast(Engine, engine or FakeEngine()), HttpMetrics()
    return ServerContext(make_settings(), served, http, created=0, history=FigureHistory(served, http))


def make_page(engine: FakeEngine | None = None) -> MetricsPage:
    """Its page of metrics."""
    return MetricsPage(make_context(engine))


def described(page: str) -> str:
    """A line for each of our families on a page."""
    lines = []
    for family in text_string_to_metric_families(page):
        if not family.name.startswith(PREFIX):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        bounds = dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(" ".join((name, family.type, ",".join(labels), ",".join(bounds))).rstrip() + "\n")
    return HEAD + "".join(sorted(lines))


def of_today() -> str:
    """What the file would hold if it was written now."""
    return described(make_page().render(openmetrics=False).decode())


if __name__ == "__main__":
    GOLDEN.write_text(of_today(), encoding="utf-8")
    print(f"written to {GOLDEN}")
