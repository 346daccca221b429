"""The dashboards as Grafana will read them, and the expressions in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
NAMES = ("serving", "speculation", "scheduling", "kv_cache", "errors")


def load(name: str) -> dict[str, Any]:
    """One dashboard."""
    board: dict[str, Any] = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    return board


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels, headings left out."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, expression) of each query."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def all_expressions() -> list[str]:
    """Of all dashboards."""
    return [expr for name in NAMES for _, expr in expressions(load(name))]


def filled_in(expr: str, window: str = "15s", whole: str = "5m") -> str:
    """The expression as Grafana sends it when all models and instances are chosen."""
    return (
        expr.replace("$__rate_interval", window)
        .replace("$__range", whole)
        .replace('"$model_name"', '".+"')
        .replace('"$instance"', '".+"')
    )
