"""The chart, rendered by Helm's own engine; what needs it is marked `helm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from deploy.kubernetes.build import CHART
from tests.deploy.chart_values import Values

Object = dict[str, Any]

RELEASE, NAMESPACE = "slipstream", "models"


def render(values: Values, release: str = RELEASE, revision: int = 1) -> dict[str, str]:
    """The text of each template by its path. Raises HelmError with what the chart or its schema refuses."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts: dict[str, str] = chart.render(values, name=release, namespace=NAMESPACE, revision=revision)
    return texts


def objects(values: Values, release: str = RELEASE) -> list[Object]:
    """All objects that an installation would make, its test included."""
    return list(_objects(render(values, release)))


def _objects(texts: dict[str, str]) -> Iterator[Object]:
    for path, text in texts.items():
        if path.endswith(".yaml"):
            yield from (each for each in yaml.safe_load_all(text) if each)


def of_kind(found: list[Object], kind: str) -> Object:
    """The only object of its kind. Raises ValueError when there is none or another."""
    [one] = [each for each in found if each["kind"] == kind]
    return one


def container(found: list[Object]) -> Object:
    """The server's container."""
    [one] = of_kind(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(one)
