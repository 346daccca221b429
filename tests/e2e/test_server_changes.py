"""PATCH /server_info: drafting changed for all requests while they run, with the server's own key alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from config.schema import SchedulerSettings
from tests.e2e.http_server import make_settings, served, server_url
from tests.e2e.wire import RawReply, ask
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_drafters import FakeDrafter

PATH = "/server_info"


async def patch(url: str, headers: dict[str, str] | None = None, **change: Any) -> RawReply:
    return await ask(url, "PATCH", PATH, {"speculation": change}, headers)


async def generate(url: str, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens were drafted for it."""
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, **fields}
    reply = (await ask(url, "POST", "/v1/completions", body)).json()
    drafted = reply["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return reply["choices"][0]["text"], drafted


async def test_drafting_ends_and_begins_for_all_and_no_token_changes() -> None:
    async with (
        running_engine(EngineShape(schedule="sync"), drafters=[FakeDrafter()]) as harness,
        server_url(harness.engine) as url,
    ):
        text, drafted = await generate(url)
        assert drafted > 0
        off = (await patch(url, enabled=False)).json()["speculation"]
        assert (off["on"], off["enabled"]) == (False, False)
        assert off["why_off"] == "Drafting was turned off for all requests."
        page = (await ask(url, "GET", "/metrics")).body.decode()
        assert 'speculation_enabled{drafter="draft_model",model_name="test-model"} 0' in page
        assert await generate(url) == (text, 0)
        assert await generate(url, speculation={"enabled": True}) == (text, 0), "the server's no is a no"
        on = (await patch(url, enabled=True, num_tokens=1, length_policy="threshold")).json()["speculation"]
        assert (on["on"], on["num_tokens"], on["length_policy"]) == (True, 1, "threshold")
        again, shorter = await generate(url, speculation={"num_tokens": 4})
        assert (again, 0 < shorter < drafted) == (text, True)
        histogram = harness.engine.metrics.speculation.acceptance_histogram
        assert len(histogram) > 2, "rounds of before were longer"
        assert (await ask(url, "GET", PATH)).json()["speculation"]["num_tokens"] == 1


async def test_requests_that_run_are_drafted_for_otherwise_too() -> None:
    async with (
        running_engine(EngineShape(schedule="sync"), drafters=[FakeDrafter()]) as harness,
        server_url(harness.engine) as url,
    ):
        plain = [await generate(url, prompt=[seed, 3]) for seed in range(6)]
        running = [asyncio.create_task(generate(url, prompt=[seed, 3])) for seed in range(6)]
        for change in (
            {"num_tokens": 2},
            {"length_policy": "goodput"},
            {"enabled": False},
            {"enabled": True},
        ):
            assert (await patch(url, **change)).status == 200
        found = await asyncio.gather(*running)
    assert [text for text, _ in found] == [text for text, _ in plain]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({}, "speculation"),
        ({"enabled": None}, "speculation"),
        ({"enabled": 1}, "speculation.enabled"),
        ({"num_tokens": 0}, "speculation.num_tokens"),
        ({"num_tokens": 9}, "speculation.num_tokens"),
        ({"length_policy": "best"}, "speculation.length_policy"),
        ({"method": "ngram"}, "speculation.method"),
    ],
)
async def test_a_wrong_change_is_named_and_changes_nothing(change: dict[str, Any], param: str) -> None:
    async with running_engine(drafters=[FakeDrafter()]) as harness, server_url(harness.engine) as url:
        before = (await ask(url, "GET", PATH)).json()
        reply = await patch(url, **change)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)
        assert (await ask(url, "GET", PATH)).json() == before
        wrong: list[object] = [{}, [], {"speculation": None}, {"scheduler": {}}]
        for body in wrong:
            assert (await ask(url, "PATCH", PATH, body)).status == 400


async def test_where_nothing_drafts_nothing_can_be_changed() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        reply = await patch(url, enabled=True)
    assert (reply.status, reply.json()["error"]["message"]) == (
        400,
        "No drafter is loaded: --speculative-method is none.",
    )


async def test_of_several_keys_only_the_first_may() -> None:
    first, second = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with (
        running_engine(drafters=[FakeDrafter()]) as harness,
        server_url(harness.engine, api_key=("one", "two")) as url,
    ):
        assert (await patch(url, enabled=False)).status == 401
        refused = await patch(url, second, enabled=False)
        assert (refused.status, refused.json()["error"]["code"]) == (403, "not_the_server_key")
        assert harness.parts.batcher.decoder.rules.enabled
        assert (await ask(url, "GET", PATH, None, second)).status == 200, "all may look"
        assert (await patch(url, first, enabled=False)).status == 200
        assert not harness.parts.batcher.decoder.rules.enabled


async def test_whom_a_gateway_names_does_not_hold_its_key() -> None:
    settings = make_settings(api_key=("one",)).model_copy(
        update={"scheduler": SchedulerSettings(tenant_header="x-tenant")}
    )
    key = {"authorization": "Bearer one"}
    async with (
        running_engine(drafters=[FakeDrafter()]) as harness,
        served(settings, harness.engine) as url,
    ):
        assert (await patch(url, {**key, "x-tenant": "a"}, enabled=False)).status == 403
        assert (await patch(url, key, enabled=False)).status == 200
