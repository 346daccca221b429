"""/version, /load and /server_info: what runs here and how busy it is. Answered from memory."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine
from server.http.context import ServerContext, context_of
from server.http.json_reply import json_response
from server.observability.health import server_version

router = APIRouter(tags=["server"])

# Settings of the HTTP side, keys and files above all, are only for the operator.
_SHOWN_SETTINGS: dict[str, set[str] | bool] = {
    "model": {"dtype", "compile", "cpu_kernels", "quantization"},
    "cache": True,
    "scheduler": True,
    "speculation": True,
}


@router.get("/version")
async def show_version() -> Response:
    """The server's version."""
    return json_response({"version": server_version()})


@router.get("/load")
async def show_load(request: Request) -> Response:
    """How much there is to do; `server_load` is vLLM's name for the requests being served."""
    context = context_of(request)
    gauges = context.engine.gauges()
    return json_response(
        {
            "server_load": len(context.live),
            "num_requests_running": gauges.num_requests_running,
            "num_requests_waiting": gauges.num_requests_waiting,
            "num_requests_swapped": gauges.num_requests_swapped,
            "kv_cache_usage": _usage(gauges.kv_blocks_used, gauges.kv_blocks_cached + gauges.kv_blocks_free),
        }
    )


def _usage(used: int, others: int) -> float:
    return round(used / (used + others), 4) if used else 0.0


@router.get("/server_info")
async def show_server_info(request: Request) -> Response:
    """The model as it was loaded and how it is drafted for, both null before that; settings of its work."""
    return json_response(server_facts(context_of(request)))


def server_facts(context: ServerContext) -> dict[str, object]:
    """What the server tells of itself, as JSON."""
    info = context.info
    return {
        "version": server_version(),
        "state": context.engine.state.value,
        "started": context.created,
        "served_model_names": list(context.served_names),
        "model": None if info is None else asdict(info),
        "speculation": drafting_object(context.engine),
        "settings": context.settings.model_dump(mode="json", include=_SHOWN_SETTINGS),
    }


def drafting_object(engine: Engine) -> dict[str, object] | None:
    """Whether drafts are made, by whom, when and why not, and what they gain; None before the load."""
    state = engine.drafting()
    if state is None:
        return None
    gauges = engine.gauges()
    return {
        "on": state.why_off is None,
        "why_off": state.why_off,
        **asdict(state.rules),
        "schedule": state.schedule,
        "drafters": [
            {
                "method": each.method,
                "on": each.why_off is None,
                "schedule": each.schedule,
                "num_tokens": each.max_tokens,
                "why_off": each.why_off,
            }
            for each in state.drafters
        ],
        "speedup": round(gauges.speculation_speedup, 4),
        "theoretical_speedup": round(gauges.formula.speedup, 4),
        "formula": {name: round(value, 4) for name, value in asdict(gauges.formula).items()},
    }
