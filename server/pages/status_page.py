"""GET /: the status page."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from server.pages.page import Page, load_page


def load_status_page() -> Page:
    """The page. It writes only text into itself: its policy lets no script make markup of a string."""
    return load_page("status.html", {"require-trusted-types-for": "'script'", "trusted-types": "'none'"})


def status_router() -> APIRouter:
    """The route, with the page read once. Not part of the API's document: it is for people."""
    page = load_status_page()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def show_status() -> Response:
        """The same bytes for every viewer; the page asks for what it shows with the viewer's key."""
        return page.response()

    return router
