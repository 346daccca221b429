"""Dashboards ask for what exists, look as Grafana wants them, and are the ones that their source makes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from jsonschema import Draft202012Validator

from deploy.grafana.build import dashboard_texts
from tests.deploy.dashboards import GRAFANA, NAMES, expressions, filled_in, load, panels
from tests.deploy.known_metrics import ROOT, exposed, recorded
from tests.deploy.promql import kept_labels, label_values, metric_names

plugins.register_default_plugins()
SCHEMA = json.loads((ROOT / "tests" / "deploy" / "dashboard_schema.json").read_text(encoding="utf-8"))


def test_the_files_are_what_their_source_makes() -> None:
    made = dashboard_texts()
    kept = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert kept == made, "run make dashboards"
    assert {f"{name}.json" for name in NAMES} == set(made)


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_schema_is_kept(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(load(name))


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_own_model_knows_every_key(name: str) -> None:
    """What its typed records would not take in, or not give back, Grafana would pass over in silence."""
    board = load(name)
    assert _lost(board, _through_grafanas_model(board)) == []
    first = next(panels(board))
    first["options"]["colourMode"] = "value"
    first["fieldConfig"]["defaults"]["units"] = "s"
    lost = _lost(board, _through_grafanas_model(board))
    assert [path.rpartition(".")[2] for path in lost] == ["units", "colourMode"]


def test_the_schema_can_say_no() -> None:
    validator = Draft202012Validator(SCHEMA)
    for path, value in (
        (("panels", 1, "targets", 0, "expr"), ""),
        (("panels", 1, "type"), "graph"),
        (("panels", 1, "gridPos", "w"), 25),
        (("panels", 1, "fieldConfig", "defaults", "thresholds", "steps", 0, "value"), "high"),
        (("panels", 1, "datasource", "uid"), "abc"),
        (("schemaVersion",), "39"),
    ):
        board: Any = load("serving")
        place = board
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert not validator.is_valid(board), path


@pytest.mark.parametrize("name", NAMES)
def test_expressions_ask_only_for_what_exists(name: str) -> None:
    known = exposed()
    for title, expr in expressions(load(name)):
        assert "$" not in filled_in(expr), f"{title}: {expr} has a variable that nobody sets"
        asked = metric_names(filled_in(expr))
        assert asked and asked <= known.keys() | recorded(), (title, asked - known.keys())
        for metric, label, _ in label_values(expr):
            assert metric not in known or label in known[metric].labels, (title, metric, label)
        labels = frozenset[str]().union(*(known[metric].labels for metric in asked & known.keys()))
        assert asked & recorded() or kept_labels(expr) <= labels, (title, expr)


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_shows_and_lies_alone(name: str) -> None:
    board = load(name)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels(board):
        assert panel["targets"] and panel["title"] and panel["description"].endswith(".")
        refs = Counter(target["refId"] for target in panel["targets"])
        assert max(refs.values()) == 1
    assert len({panel["title"] for panel in panels(board)} | {""}) > 10
    for one, other in combinations((panel["gridPos"] for panel in board["panels"]), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


@pytest.mark.parametrize("name", NAMES)
def test_a_panel_that_can_be_empty_says_why(name: str) -> None:
    for panel in panels(load(name)):
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
        for target in panel["targets"]:
            # 0 / 0 would be drawn as an empty chart without a word.
            divides = " / " in target["expr"] or "histogram_quantile" in target["expr"]
            assert panel["type"] == "heatmap" or not divides or target["expr"].endswith(("> -Inf", "> 0"))


def test_no_two_panels_of_a_board_ask_the_same_but_for_the_window() -> None:
    titles = [panel["title"] for panel in panels(load("errors"))]
    assert [title for title in titles if title.startswith("Burn rate")] == ["Burn rate"]


def test_dashboards_have_addresses_that_stay() -> None:
    assert [load(name)["uid"] for name in NAMES] == [
        "slipstream-serving",
        "slipstream-speculation",
        "slipstream-scheduling",
        "slipstream-kv-cache",
        "slipstream-errors",
    ]


def test_provisioning_names_the_source_and_the_folder() -> None:
    sources = yaml.safe_load(
        (GRAFANA / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    (source,) = sources["datasources"]
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    folders = yaml.safe_load((GRAFANA / "provisioning/dashboards/slipstream.yml").read_text(encoding="utf-8"))
    (folder,) = folders["providers"]
    assert folder["type"] == "file" and folder["options"]["path"] == "/var/lib/grafana/dashboards"


def _through_grafanas_model(board: dict[str, Any]) -> Any:
    return json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))


def _lost(sent: Any, received: Any, path: str = "") -> list[str]:
    """Where `received` lacks or alters something of `sent`."""
    if isinstance(sent, dict) and isinstance(received, dict):
        parts = [(f"{path}.{key}", value, received.get(key)) for key, value in sent.items()]
    elif isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        parts = [(f"{path}[{place}]", *pair) for place, pair in enumerate(zip(sent, received, strict=True))]
    else:
        return [] if sent == received else [path]
    return [each for name, value, other in parts for each in _lost(value, other, name)]
