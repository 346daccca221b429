"""The series that rules and dashboards may ask for: of servers, of recording rules, of Prometheus itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.metrics_golden import GOLDEN

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules"

# By every scrape, and by the Python client's collector of the process.
_OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "severity"}}
_OF_THE_PROCESS = (
    *("process_start_time_seconds", "process_open_fds", "process_max_fds"),
    *("process_resident_memory_bytes", "process_cpu_seconds_total"),
)


@dataclass(frozen=True)
class Series:
    """One name with the labels it may have; of a histogram's buckets also the bounds."""

    labels: frozenset[str]
    bounds: frozenset[str] = frozenset()


@cache
def exposed() -> dict[str, Series]:
    """Every sample name of the page of metrics, with the labels that a scrape adds."""
    found: dict[str, Series] = {}
    for line in GOLDEN.read_text(encoding="utf-8").splitlines()[1:]:
        name, kind, names, *bounds = line.split(" ")
        labels = frozenset(names.split(",")) | {"job", "instance"}
        if kind != "histogram":
            found[name] = Series(labels)
            continue
        found |= {f"{name}_{part}": Series(labels) for part in ("sum", "count")}
        found[f"{name}_bucket"] = Series(labels | {"le"}, frozenset(bounds[0].split(",")))
    own = {name: {"job", "instance"} for name in _OF_THE_PROCESS}
    return found | {name: Series(frozenset(labels)) for name, labels in (_OF_PROMETHEUS | own).items()}


def rules(file_name: str) -> list[dict[str, Any]]:
    """The rules of one file, all groups after each other."""
    groups = yaml.safe_load((RULES / file_name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def recorded() -> frozenset[str]:
    """The names that the two files of recording rules make."""
    return frozenset(rule["record"] for name in ("recording.yml", "vllm_aliases.yml") for rule in rules(name))
