"""Writes dashboards/*.json, which Grafana reads: `make dashboards`, after a change to boards/."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.boards.errors import ERRORS
from deploy.grafana.boards.kv_cache import KV_CACHE
from deploy.grafana.boards.scheduling import SCHEDULING
from deploy.grafana.boards.serving import SERVING
from deploy.grafana.boards.speculation import SPECULATION
from deploy.grafana.panels import dashboard_json

BOARDS = {
    "serving": SERVING,
    "speculation": SPECULATION,
    "scheduling": SCHEDULING,
    "kv_cache": KV_CACHE,
    "errors": ERRORS,
}


def dashboard_texts() -> dict[str, str]:
    """The name and the text of each file."""
    return {
        f"{name}.json": json.dumps(dashboard_json(board), indent=2, ensure_ascii=False) + "\n"
        for name, board in BOARDS.items()
    }


if __name__ == "__main__":
    folder = Path(__file__).with_name("dashboards")
    folder.mkdir(exist_ok=True)
    for name, text in dashboard_texts().items():
        (folder / name).write_text(text, encoding="utf-8")
