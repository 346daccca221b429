"""Whose turns and places a request takes: its key's, a header's, or its user's where one key serves all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from config import SchedulerSettings
from engine.loop.engine_parts import EngineLimits
from tests.e2e.http_server import make_settings, served
from tests.e2e.wire import ask
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_engine import FakeEngine

BODY = {"prompt": "hi", "max_tokens": 1}
KEY = {"authorization": "Bearer k1"}


async def tenant_of(
    home: Path,
    headers: dict[str, str],
    keys: tuple[str, ...] = ("k1",),
    header: str | None = None,
    **fields: Any,
) -> str | None:
    """The tenant that one request is prepared for."""
    scheduler = SchedulerSettings(tenant_header=header)
    settings = make_settings(api_key=keys).model_copy(update={"scheduler": scheduler, "home": home})
    engine = FakeEngine()
    async with served(settings, engine) as url:
        reply = await ask(url, "POST", "/v1/completions", {**BODY, **fields}, headers)
        assert reply.status == 200, reply.body
    return engine.requests[-1].tenant


async def test_users_are_tenants_where_one_key_serves_all(tmp_path: Path) -> None:
    own = await tenant_of(tmp_path, KEY)
    ann, bob = [await tenant_of(tmp_path, KEY, user=name) for name in ("ann", "bob")]
    assert len({own, ann, bob}) == 3 and "ann" not in f"{ann}"
    assert await tenant_of(tmp_path, KEY, user="x", safety_identifier="ann") == ann
    assert await tenant_of(tmp_path, KEY, user=7) == own
    assert await tenant_of(tmp_path, KEY, keys=("k1", "k2"), user="ann") == own
    assert await tenant_of(tmp_path, {}, keys=(), user="ann") is None


async def test_a_gateways_header_names_tenants_only_where_it_is_set(tmp_path: Path) -> None:
    named = {**KEY, "x-team": "blue"}
    assert await tenant_of(tmp_path, named, header="X-Team") == "blue"
    assert await tenant_of(tmp_path, {"x-team": "blue"}, keys=(), header="x-team") == "blue"
    own = await tenant_of(tmp_path, KEY)
    assert await tenant_of(tmp_path, named) == own
    assert await tenant_of(tmp_path, KEY, header="x-team") == own
    for odd in ("no name", "anonymous"):
        shown = await tenant_of(tmp_path, {**KEY, "x-team": odd}, header="x-team")
        assert shown is not None and len(shown) == 16 and shown != own


async def test_a_displaced_request_gets_an_honest_503() -> None:
    settings = make_settings(api_key=("k1",))
    limits = EngineLimits(max_queued_requests=2)
    async with (
        running_engine(EngineShape(max_num_seqs=1), limits=limits) as harness,
        served(settings, harness.engine) as url,
    ):
        await anext(harness.submit([1, 2], max_tokens=100, tenant="running"))
        flood = []
        for number in range(2):
            body = {**BODY, "max_tokens": 4, "user": "flood"}
            flood.append(asyncio.create_task(ask(url, "POST", "/v1/completions", body, KEY)))
            while len(harness.parts.batcher.queue) < number + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        other = asyncio.create_task(ask(url, "POST", "/v1/completions", {**BODY, "user": "other"}, KEY))
        refused = await flood[1]
        error = refused.json()["error"]
        assert (refused.status, error["type"], error["code"]) == (503, "overloaded_error", "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        harness.engine.cancel("request-1")
        assert [(await each).status for each in (flood[0], other)] == [200, 200]
