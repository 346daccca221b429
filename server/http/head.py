"""HeadMiddleware: HEAD is answered as GET is, on every path that takes GET."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.unrouted import is_served


class HeadMiddleware:
    """Shows the routes a GET in place of a HEAD; the connection, which knows better, leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        if not is_served(Request(scope), scope["path"], "GET"):
            await self.app(scope, receive, send)
            return
        shown = {**scope, "method": "GET"}
        try:
            await self.app(shown, receive, send)
        finally:  # what the routes have noted in it is read by the layers outside
            scope.update({**shown, "method": "HEAD"})
