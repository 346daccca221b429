"""Writes what of the chart follows from the rest: `make chart`, after a change of a setting or of the chart.

The settings in values.schema.json, and manifests/slipstream.yaml for people without Helm.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from deploy.kubernetes.settings_schema import config_schema

FOLDER = Path(__file__).parent
CHART = FOLDER / "slipstream"
SCHEMA = CHART / "values.schema.json"
MANIFEST = FOLDER / "manifests" / "slipstream.yaml"
_HEAD = """# What the chart makes of its defaults, for people without Helm. Written by `make chart`.
# From sources whose digest is {digest}.
"""
_MARKS = ("namespace: default", "app.kubernetes.io/managed-by:", "helm.sh/chart:")


def schema_text() -> str:
    """The text of values.schema.json with today's settings in it; the rest of it is kept as it stands."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def manifest_text() -> str:
    """The chart's defaults, rendered by Helm's own engine (the package helm-python-sdk)."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        rendered = chart.render({}, name="slipstream", namespace="default")
    parts = [f"---\n{_plain(text)}\n" for path, text in sorted(rendered.items()) if _is_applied(path, text)]
    return _HEAD.format(digest=sources_digest()) + "".join(parts)


def sources_digest() -> str:
    """A digest of all that the manifest is made of, by which one that is out of date is told without Helm."""
    sources = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted(CHART.glob("templates/**/*.*"))]
    whole = hashlib.sha256()
    for path in sources:
        whole.update(f"{path.relative_to(CHART).as_posix()}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def _is_applied(path: str, text: str) -> bool:
    """True for what is no test, no note, no helper and not empty."""
    return path.endswith(".yaml") and "/tests/" not in path and bool(text.strip())


def _plain(text: str) -> str:
    """An object without the marks of Helm and of the namespace, which kubectl has its own way to choose."""
    return "\n".join(line for line in text.strip().splitlines() if not line.strip().startswith(_MARKS))


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    MANIFEST.parent.mkdir(exist_ok=True)
    MANIFEST.write_text(manifest_text(), encoding="utf-8")
