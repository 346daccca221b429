"""SiteGuard: keeps pages of other sites away from a server that a browser on this machine can reach.

A page may send requests to any address, and some of them without asking first. Two headers that only the
browser writes tell them apart: Host still names the attacker's site after DNS rebinding, and Origin names
the page. Programs send what they like in both; API keys are against those.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from config import ServerSettings
from server.api.body import IGNORED_HEADER
from server.http.client import is_json
from server.http.errors import INVALID, PERMISSION, ApiError, ErrorReply, shown

ANY = "*"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# A browser asks the server before it lets a page send any of them.
_ASKED_FIRST = ("authorization", "x-api-key", "x-requested-with", "x-request-id")
_WANTED_OF_NONE = "A POST without a body needs the header 'content-type: application/json'."
WANTED_OF_FORMS = (
    "An upload needs a header that no web page sends unasked, such as 'authorization' or 'x-request-id'."
)
_READABLE = (
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "retry-after",
    "x-should-retry",
    IGNORED_HEADER.decode(),
)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:/@\s]+))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class SiteRules:
    """Which Hosts are answered and which Origins may change anything.

    `hosts` are names answered beside the loopback ones; None answers any name. `addresses` answers any IP
    address, too: no DNS name can be rebound to look like one. `origins` are allowed beside the server's own.
    """

    hosts: frozenset[str] | None
    addresses: bool
    origins: frozenset[str]

    def answers(self, host: str) -> bool:
        """Whether a request with this Host header is meant for this server."""
        found = _HOST.fullmatch(host.lower())
        if self.hosts is None:
            return True
        if found is None:
            return False
        name = found[1] or found[2].removesuffix(".")
        return name in self.hosts or _is_loopback(name) or (self.addresses and _address_of(name) is not None)

    def trusts(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may ask the server that it calls `host` to change anything."""
        scheme, _, authority = origin.lower().partition("://")
        is_own = scheme in ("http", "https") and authority != "" and authority == host.lower()
        return is_own or ANY in self.origins or origin.lower() in self.origins


def rules_of(settings: ServerSettings, is_public: bool) -> SiteRules:
    """The rules the settings ask for; `is_public` says that other machines may connect."""
    named = frozenset(settings.allowed_host)
    if ANY in named or (is_public and not named):
        return SiteRules(None, True, frozenset(settings.cors_origin))
    return SiteRules(named | {settings.host.lower()}, is_public, frozenset(settings.cors_origin))


def _is_loopback(name: str) -> bool:
    """True for what every browser takes for this machine without asking any DNS server."""
    address = _address_of(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class SiteGuard:
    """Refuses requests for another site's name, and those by which its pages would change something."""

    def __init__(self, app: ASGIApp, rules: SiteRules) -> None:
        self.app = app
        self._rules = rules
        self._last_answered = b""  # nearly all requests name the server in the same way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it before its body is read."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await refusal.send(scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        # A connection lets no second Host in. Browsers always send one; HTTP/1.0 probes need not.
        given = next((value for name, value in scope["headers"] if name == b"host"), b"")
        host = given.decode("latin-1")
        if given and given != self._last_answered and not self._rules.answers(host):
            message = f"The server does not answer to the name '{shown(host)}': --allowed-host would let it."
            return ErrorReply(403, PERMISSION, message, code="host_not_allowed")
        self._last_answered = given
        if scope["method"] in _SAFE_METHODS:
            return None
        for name, value in scope["headers"]:
            if name == b"origin" and not self._rules.trusts(value.decode("latin-1"), host):
                message = "Pages of another origin may change nothing here: --cors-origin would let them."
                return ErrorReply(403, PERMISSION, message, code="origin_not_allowed")
        return None


def refuse_simple(request: Request, wanted: str = _WANTED_OF_NONE) -> None:
    """Refuse a POST that a browser would send for any page without asking first. Raises ApiError (415).

    A body must be JSON anyway, which says the same; this is for routes that need none, or take a form. The
    error says what is `wanted`.
    """
    headers = request.headers
    if any(name in headers for name in _ASKED_FIRST):
        return
    if not is_json(headers.get("content-type", "").encode("latin-1")):
        raise ApiError(ErrorReply(415, INVALID, wanted, code="unsupported_media_type"))


def allow_origins(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let pages of `origins` send anything and read the replies. They never send a user's cookies."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "PATCH", "DELETE"),
        allow_headers=(ANY,),
        allow_private_network=True,
        expose_headers=_READABLE,
    )
