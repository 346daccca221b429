"""GET /: the status page, one HTML file that holds its style and scripts, under a policy that admits no more.

The parts lie in static/ as files of their own, so that each can be read and checked; they are joined once.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_PART = re.compile(r"[ ]*<!-- (style|script): ([a-z_]+\.(?:css|js)) -->")


@dataclass(frozen=True, slots=True)
class StatusPage:
    """The whole document and the content security policy that allows exactly its own style and scripts."""

    html: str
    policy: str

    def response(self) -> Response:
        """The reply; `no-cache` because a page of another version may not fit this server's figures."""
        headers = {
            "content-security-policy": self.policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return Response(self.html, media_type="text/html", headers=headers)


def load_page() -> StatusPage:
    """Put the parts that static/status.html names where it names them."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        tag, name = match.groups()
        text = f"\n{_read(name)}"
        assert f"</{tag}" not in text, name
        hashes[tag].append(_source_of(text))
        return f"<{tag}>{text}</{tag}>"

    html = _PART.sub(inline, _read("status.html"))
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return StatusPage(html, "; ".join(f"{name} {value}" for name, value in rules.items()))


def _read(name: str) -> str:
    return files("server.observability").joinpath("static", name).read_text(encoding="utf-8")


def _source_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def status_router() -> APIRouter:
    """The route, with the page read once. Not part of the API's document: it is for people."""
    page = load_page()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def show_status() -> Response:
        """The same bytes for every viewer; the page asks for what it shows with the viewer's key."""
        return page.response()

    return router
