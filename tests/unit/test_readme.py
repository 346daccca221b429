"""The README is short, leads to each of its parts, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from engine import Engine
from server.app import build_app
from tests.e2e.http_server import make_settings
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Other names of what is listed, and small answers that nobody looks for in a README.
NOT_LISTED = {
    *("/ping", "/ready", "/health/live", "/version", "/load", "/server_info", "/reset_prefix_cache"),
    "/v1/models/{model_id}",
}


def test_it_is_short() -> None:
    assert README.count("\n") <= 200


def test_its_contents_lead_to_every_part() -> None:
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    anchors = [re.sub(r"[^a-z -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"\]\(#([a-z-]+)\)", README) == anchors


def test_its_links_lead_somewhere() -> None:
    files = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(files) >= 5
    assert [each for each in files if not (ROOT / each).exists()] == []


def test_it_names_every_endpoint() -> None:
    app = build_app(make_settings(), cast(Engine, FakeEngine()))
    listed = README[README.index("## Endpoints") : README.index("## Priorities")]
    listed = listed.replace("`POST .../cancel`", "`/v1/requests/{request_id}/cancel`").replace("{id}", "{}")
    for path in app.openapi()["paths"].keys() - NOT_LISTED:
        assert re.sub(r"\{\w+\}", "{}", path) in re.sub(r"\{\w+\}", "{}", listed), path
    for path in ("/", "/docs", "/openapi.json"):
        assert f"`{path}`" in listed or f"`GET {path}`" in listed, path


def test_its_examples_are_not_left_to_chance() -> None:
    """At a small model's own temperature the first answer of a newcomer may be nonsense."""
    chats = re.findall(r"\"messages\".*?\n}'", README, re.DOTALL)
    assert len(chats) >= 2
    for chat in chats:
        assert '"temperature": 0.2' in chat
