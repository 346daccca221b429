"""GET /: the status page, and what it draws."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http.context import ServerContext, context_of
from server.http.errors import invalid, shown
from server.http.json_reply import encode_json
from server.observability.health import server_version
from server.pages.page import Page, load_page

FIGURES_PATH = "/status/figures"


def load_status_page() -> Page:
    """The page. It writes only text into itself: its policy lets no script make markup of a string."""
    return load_page("status.html", {"require-trusted-types-for": "'script'", "trusted-types": "'none'"})


def status_router() -> APIRouter:
    """The routes, with the page read once. Not part of the API's document: they are for people."""
    page = load_status_page()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def show_status() -> Response:
        """The same bytes for every viewer; the page asks for what it shows with the viewer's key."""
        return page.response()

    @router.get(FIGURES_PATH)
    async def show_figures(request: Request) -> Response:
        """Facts, and samples in order of time, of which the last is of now. Its form may change.

        `after` in the query leaves out what was kept until so many seconds after the start.
        """
        context = context_of(request)
        after_s = _seconds(request.query_params.get("after", "-1"))
        facts, samples = encode_json(_facts(context)), ",".join(context.history.since(after_s))
        body = f'{facts[:-1]},"samples":[{samples}]}}'
        return Response(
            body.encode("ascii"), headers={"cache-control": "no-store"}, media_type="application/json"
        )

    return router


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise invalid(f"'after' is a number of seconds, not '{shown(text)}'.", "after") from None


def _facts(context: ServerContext) -> dict[str, object]:
    """`bounds` are the histograms', without the infinite one, which JSON cannot say."""
    metrics, drafting = context.engine.metrics, context.engine.drafting()
    return {
        "model": context.served_names[0],
        "version": server_version(),
        "started": context.created,
        "no_drafts_because": None if drafting is None else drafting.why_off,
        "bounds": {"ttft": metrics.time_to_first_token.bounds, "itl": metrics.inter_token_latency.bounds},
    }
