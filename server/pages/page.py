"""Page: one HTML document that holds its own style and scripts, under a policy that names them.

The parts lie in static/ as files of their own, so that each can be read and checked; they are joined once.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from starlette.responses import Response

_PART = re.compile(r"[ ]*<!-- (style|script): ([a-z_]+\.(?:css|js)) -->")


@dataclass(frozen=True, slots=True)
class Page:
    """The whole document and the content security policy that allows exactly what it holds."""

    html: str
    policy: str

    def response(self) -> Response:
        """The reply; `no-cache` because a page of another version may not fit this server's replies."""
        headers = {
            "content-security-policy": self.policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return Response(self.html, media_type="text/html", headers=headers)


def load_page(name: str, more: Mapping[str, str]) -> Page:
    """Put the parts that static/`name` names where it names them. `more` are rules of its policy.

    A rule for `script` or `style` says what the page may load besides the parts.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        tag, part = match.groups()
        text = f"\n{_read(part)}"
        assert f"</{tag}" not in text, part
        hashes[tag].append(_source_of(text))
        return f"<{tag}>{text}</{tag}>"

    html = _PART.sub(inline, _read(name))
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for rule, value in more.items():
        rules[rule] = f"{rules[rule]} {value}" if rule in ("script-src", "style-src") else value
    return Page(html, "; ".join(f"{rule} {value}" for rule, value in rules.items()))


def _read(name: str) -> str:
    return files("server.pages").joinpath("static", name).read_text(encoding="utf-8")


def _source_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
