"""GET /docs: the API's description, drawn by Swagger UI out of /openapi.json, without a network.

Swagger UI comes in the package fastapi-offline, of which only the two files are used: its own page loads
them by an inline script, which the policy here would refuse, and it asks for no key.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from server.pages.page import Page, load_page

SCRIPT_PATH = "/docs/swagger-ui-bundle.js"
STYLE_PATH = "/docs/swagger-ui.css"
SHELL_PATHS = frozenset(
    {"/docs", SCRIPT_PATH, STYLE_PATH}
)  # what the page is made of: nothing of this server's
_PACKAGE = "fastapi-offline"


def load_api_page() -> Page:
    """The page, which loads its script and style from this server alone, again when their version changes."""
    page = load_page("api.html", {"script-src": "'self'", "style-src": "'self'"})
    return Page(page.html.replace("VERSION", version(_PACKAGE)), page.policy)


def api_page_router() -> APIRouter:
    """The page and the two files it loads."""
    page = load_api_page()
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def show_docs() -> Response:
        """The same bytes for every viewer; the page asks for the document with the viewer's key."""
        return page.response()

    @router.get(SCRIPT_PATH)
    async def send_script() -> Response:
        """Swagger UI."""
        return _asset(SCRIPT_PATH, "text/javascript")

    @router.get(STYLE_PATH)
    async def send_style() -> Response:
        """Its style."""
        return _asset(STYLE_PATH, "text/css")

    return router


def _asset(path: str, media_type: str) -> Response:
    headers = {"cache-control": "max-age=86400", "x-content-type-options": "nosniff"}
    return Response(_read(path.rsplit("/", 1)[1]), media_type=media_type, headers=headers)


@cache
def _read(name: str) -> bytes:
    """One of the package's files, kept once it was asked for."""
    return files(_PACKAGE.replace("-", "_")).joinpath("static", name).read_bytes()
