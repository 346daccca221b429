"""Live requests over HTTP: deadlines, cancel, re-prioritise, explain; each only by the key that made it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from engine.loop.controls import Controls
from engine.loop.engine_parts import EngineLimits
from engine.plan.scheduling.explanation import RequestExplanation
from engine.plan.step_records import StepInputs
from tests.e2e.http_server import server_url
from tests.e2e.wire import RawReply, Wire, ask, events_of
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"
PROMPT = [5, 6, 7, 8, 9]
ONE_SEAT = EngineShape(max_num_seqs=1, policy="priority")


class Hold:
    """Keeps the given step from ending until `go`; says when it has begun."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._begun, self._go = threading.Event(), threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self._step -= 1
        if self._step == 0:
            self._begun.set()
            assert self._go.wait(20)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 10)

    def go(self) -> None:
        self._go.set()


def generate(
    url: str, name: str, max_tokens: int = 100, headers: Mapping[str, str] | None = None, **fields: Any
) -> asyncio.Task[RawReply]:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **fields}
    return asyncio.create_task(ask(url, "POST", PATH, body, {"x-request-id": name, **(headers or {})}))


async def wait_for_queue(url: str, name: str) -> dict[str, Any]:
    """What the server says of a request once it has it."""
    async with asyncio.timeout(10):
        while (reply := await ask(url, "GET", f"/v1/requests/{name}")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return dict(reply.json())


def error_of(reply: RawReply) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status, error["type"], error["code"]


async def test_a_live_request_says_where_it_stands() -> None:
    hold = Hold(3)
    async with running_engine(ONE_SEAT, before=hold) as harness, server_url(harness.engine) as url:
        running = generate(url, "a/b", 4)
        await hold.begun()
        waiting = generate(url, "second", 2, n=2)
        found = (await wait_for_queue(url, "a%2Fb"))["choices"][0]
        assert (found["status"], found["waits_because"], found["position"]) == ("running", None, None)
        assert (found["known_tokens"], found["computed_tokens"], found["kv_blocks"]) == (7, 6, 2)
        assert (found["generated_tokens"], found["draft_tokens"], found["accepted_draft_tokens"]) == (2, 0, 0)
        assert found["draft_acceptance_rate"] is None
        assert found["speculation"] == {
            **{"on": False, "drafter": None, "methods": [], "schedule": None, "num_tokens": 0},
            **{"length": 0, "length_policy": "goodput"},
            "why_off": "No drafter is loaded: --speculative-method is none.",
        }
        queued = await wait_for_queue(url, "second")
        assert [each["status"] for each in queued["choices"]] == ["waiting"] * 2
        assert queued["choices"][0]["waits_because"].endswith(".")
        hold.go()
        replies = await asyncio.gather(running, waiting)
        assert replies[1].json()["id"] == queued["id"]
        for name in ("second", queued["id"], "nobody"):
            reply = await ask(url, "GET", f"/v1/requests/{name}")
            assert error_of(reply) == (404, "not_found_error", "request_not_found")


async def test_the_live_requests_are_listed_oldest_first() -> None:
    hold = Hold(3)
    async with running_engine(ONE_SEAT, before=hold) as harness, server_url(harness.engine) as url:
        empty = {"object": "list", "data": [], "has_more": False}
        assert (await ask(url, "GET", "/v1/requests")).json() == empty
        tasks = [generate(url, "a/b", 4)]
        await hold.begun()
        for name in ("second", "third"):
            tasks.append(generate(url, name, 2))
            found = await wait_for_queue(url, name)
        listed = (await ask(url, "GET", "/v1/requests")).json()
        assert [each["label"] for each in listed["data"]] == ["a/b", "second", "third"]
        assert [each["choices"][0]["status"] for each in listed["data"]] == ["running", "waiting", "waiting"]
        ages = [each["age_ms"] for each in listed["data"]]
        assert ages == sorted(ages, reverse=True)
        assert {**listed["data"][-1], "age_ms": None} == {**found, "age_ms": None}
        first = (await ask(url, "GET", "/v1/requests?limit=1")).json()
        assert ([each["label"] for each in first["data"]], first["has_more"]) == (["a/b"], True)
        for limit in ("0", "101", "-1", "x", "", "1e1", "9" * 500):
            reply = await ask(url, "GET", f"/v1/requests?limit={limit}")
            assert (reply.status, reply.json()["error"]["param"]) == (400, "limit")
        hold.go()
        await asyncio.gather(*tasks)
        assert (await ask(url, "GET", "/v1/requests")).json() == empty


async def test_others_have_their_turn_between_the_choices_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is compared with all that wait: those of one request alone take a tenth of a second."""
    hold = Hold(3)
    turn, explained_in = 0, []
    explain = Controls.explain

    async def take_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noting(controls: Controls, request_id: str) -> RequestExplanation | None:
        explained_in.append(turn)
        return explain(controls, request_id)

    async with running_engine(ONE_SEAT, before=hold) as harness, server_url(harness.engine) as url:
        running = generate(url, "first", 4)
        await hold.begun()
        waiting = generate(url, "second", 2, n=4)
        await wait_for_queue(url, "second")
        monkeypatch.setattr(Controls, "explain", noting)
        other = asyncio.create_task(take_turns())
        assert len((await ask(url, "GET", "/v1/requests/second")).json()["choices"]) == 4
        other.cancel()
        assert len(set(explained_in)) == 4
        hold.go()
        await asyncio.gather(running, waiting)


async def test_a_live_request_says_what_became_of_its_drafts() -> None:
    hold = Hold(6)
    async with (
        running_engine(EngineShape(schedule="sync"), before=hold, drafters=[FakeDrafter()]) as harness,
        server_url(harness.engine) as url,
    ):
        running = generate(url, "drafted", 60)
        await hold.begun()
        found = (await ask(url, "GET", "/v1/requests/drafted")).json()["choices"][0]
        hold.go()
        metrics = (await running).json()["metrics"]["speculative_decoding"]
        server = (await ask(url, "GET", "/server_info")).json()["speculation"]
    assert 0 < found["accepted_draft_tokens"] <= found["draft_tokens"] < metrics["num_draft_tokens"]
    rate = found["accepted_draft_tokens"] / found["draft_tokens"]
    assert found["draft_acceptance_rate"] == round(rate, 4)
    assert found["generated_tokens"] > found["accepted_draft_tokens"]
    assert found["speculation"] == {
        **{"on": True, "drafter": "draft_model", "methods": ["draft_model"]},
        **{"schedule": "sync", "num_tokens": 4, "why_off": None},
        **{"length": 4, "length_policy": "fixed"},
    }
    assert (server["on"], server["why_off"], server["schedule"]) == (True, None, "sync")
    (drafter,) = server["drafters"]
    assert drafter == {
        **{"method": "draft_model", "on": True, "schedule": "sync", "num_tokens": 4},
        "why_off": None,
    }
    assert 0 < server["formula"]["alpha"] < 1


async def test_cancel_ends_every_choice_and_works_once() -> None:
    hold = Hold(3)
    async with running_engine(before=hold) as harness, server_url(harness.engine) as url:
        running = generate(url, "mine", n=3)
        await hold.begun()
        reply = await ask(url, "POST", "/v1/requests/mine/cancel")
        hold.go()
        ended = (await running).json()
        assert (reply.status, reply.json()["id"], reply.json()["cancelled"]) == (200, ended["id"], True)
        assert [choice["finish_reason"] for choice in ended["choices"]] == ["abort"] * 3
        assert (await ask(url, "POST", "/v1/requests/mine/cancel")).status == 404
        assert harness.engine.metrics.request_aborts == {"cancel": 1}


async def test_only_the_key_that_made_a_request_may_touch_it() -> None:
    hold = Hold(2)
    mine, other = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    async with (
        running_engine(before=hold) as harness,
        server_url(harness.engine, api_key=("one", "two")) as url,
    ):
        running = generate(url, "x", headers=mine)
        await hold.begun()
        real_id = (await ask(url, "GET", "/v1/requests/x", None, mine)).json()["id"]
        for name in ("x", real_id):
            for method, path, body in (
                ("GET", f"/v1/requests/{name}", None),
                ("POST", f"/v1/requests/{name}/cancel", None),
                ("PATCH", f"/v1/requests/{name}", {"priority": 1}),
            ):
                assert (await ask(url, method, path, body, other)).status == 404
                assert (await ask(url, method, path, body)).status == 401
        listed = [(await ask(url, "GET", "/v1/requests", None, key)).json()["data"] for key in (mine, other)]
        assert [[each["id"] for each in data] for data in listed] == [[real_id], []]
        assert (await ask(url, "GET", "/v1/requests")).status == 401
        assert (await ask(url, "POST", f"/v1/requests/{real_id}/cancel", None, mine)).status == 200
        hold.go()
        await running


async def test_a_waiting_request_given_a_better_priority_overtakes() -> None:
    hold = Hold(3)
    order: list[asyncio.Task[RawReply]] = []
    async with running_engine(ONE_SEAT, before=hold) as harness, server_url(harness.engine) as url:
        first = generate(url, "first", 5)
        await hold.begun()
        tasks = []
        for name in ("second", "third"):
            tasks.append(generate(url, name, 5))
            await wait_for_queue(url, name)
            tasks[-1].add_done_callback(order.append)
        found = (await ask(url, "GET", "/v1/requests/third")).json()["choices"][0]
        assert (found["position"], found["priority"], found["deadline_ms"]) == (2, 0, None)
        patch = {"priority": -10, "deadline_ms": 60_000}
        reply = (await ask(url, "PATCH", "/v1/requests/third", patch)).json()
        found = reply["choices"][0]
        assert (found["position"], found["priority"], found["deadline_ms"]) == (1, -10, 60_000)
        again = (await ask(url, "GET", "/v1/requests/third")).json()
        assert {**again, "age_ms": reply["age_ms"]} == reply
        hold.go()
        await asyncio.gather(first, *tasks)
    assert order == [tasks[1], tasks[0]]


async def test_drafting_of_a_live_request_changes_from_the_next_step_on_and_no_token_does() -> None:
    shape = EngineShape(schedule="sync", max_draft_tokens=6)
    drafters = [FakeDrafter(method="ngram"), FakeDrafter()]
    hold = Hold(4)
    async with (
        running_engine(shape, before=hold, drafters=drafters) as harness,
        server_url(harness.engine) as url,
    ):
        running = generate(url, "x", 60)
        await hold.begun()

        async def patch(**change: Any) -> dict[str, Any]:
            reply = await ask(url, "PATCH", "/v1/requests/x", {"speculation": change})
            assert reply.status == 200, reply.body
            return reply.json()["choices"][0]["speculation"]  # type: ignore[no-any-return]

        assert (await patch(num_tokens=2, length_policy="threshold"))["num_tokens"] == 2
        off = await patch(enabled=False)
        assert (off["on"], off["why_off"]) == (False, "The request asks for no drafts.")
        assert (off["num_tokens"], off["length_policy"]) == (0, "threshold")
        on = await patch(method="draft-model")
        assert (on["num_tokens"], on["length_policy"]) == (2, "threshold")
        for wrong, param in (({"method": "magic"}, "method"), ({"num_tokens": 7}, "num_tokens")):
            change = {"priority": 3, "speculation": {"enabled": False, **wrong}}
            reply = await ask(url, "PATCH", "/v1/requests/x", change)
            assert (reply.status, reply.json()["error"]["param"]) == (400, f"speculation.{param}")
        kept = (await ask(url, "GET", "/v1/requests/x")).json()["choices"][0]
        assert (kept["priority"], kept["speculation"]) == (0, on), "a wrong change changes nothing"
        hold.go()
        changed = (await running).json()
        plain = (await generate(url, "y", 60, speculation={"enabled": False})).json()
    assert changed["choices"][0]["text"] == plain["choices"][0]["text"]
    assert changed["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert drafters[1].num_drafted > 20 > drafters[0].num_drafted


async def test_a_new_deadline_counts_from_arrival() -> None:
    hold = Hold(2)
    async with running_engine(before=hold) as harness, server_url(harness.engine) as url:
        running = generate(url, "x", deadline_ms=60_000)
        await hold.begun()
        assert (await ask(url, "PATCH", "/v1/requests/x", {"deadline_ms": 50_000})).status == 200
        await ask(url, "PATCH", "/v1/requests/x", {"deadline_ms": 1})
        assert error_of(await running) == (504, "timeout_error", "deadline_exceeded")
        hold.go()


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({}, None),
        ({"priority": None}, None),
        ({"priority": "1"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1001}, "priority"),
        ({"priority": -1001}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"prioritty": 1}, "prioritty"),
        ({"speculation": {}}, None),
        ({"speculation": {"enabled": None}}, None),
        ({"speculation": {"enabled": "yes"}}, "speculation.enabled"),
        ({"speculation": {"num_tokens": 0}}, "speculation.num_tokens"),
        ({"speculation": {"length": 2}}, "speculation.length"),
        ({"speculation": {"length_policy": "best"}}, "speculation.length_policy"),
        ([], None),
    ],
)
async def test_a_wrong_change_is_400_and_named(patch: object, param: str | None) -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        reply = await ask(url, "PATCH", "/v1/requests/x", patch)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("priority", [1001, -1001, -(2**63)])
async def test_a_priority_off_the_scale_is_400_and_names_the_scale(priority: int) -> None:
    async with server_url(FakeEngine()) as url:
        change = {"priority": priority}
        for method, path, body in (
            ("POST", "/v1/completions", {"prompt": "a", **change}),
            ("PATCH", "/v1/requests/x", change),
        ):
            reply = await ask(url, method, path, body)
            assert error_of(reply)[0] == 400
            assert "from -1000 to 1000" in reply.json()["error"]["message"]


@pytest.mark.by_default
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["field", "header", "timeout"])
async def test_a_deadline_before_the_first_byte_is_504(how: str, stream: bool) -> None:
    hold = Hold(1)
    fields: dict[str, Any] = {"deadline_ms": 200.5} if how == "field" else {}
    headers = {"x-request-deadline-ms": "200"} if how == "header" else {}
    server: dict[str, Any] = {"request_timeout": 0.2} if how == "timeout" else {}
    async with running_engine(before=hold) as harness, server_url(harness.engine, **server) as url:
        reply = await generate(url, "x", headers=headers, stream=stream, n=2, **fields)
        hold.go()
        page = (await ask(url, "GET", "/metrics")).body.decode()
    assert error_of(reply) == (504, "timeout_error", "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"
    assert 'slipstream_requests_total{finish_reason="deadline",model_name="test-model"} 1.0' in page
    assert 'slipstream_deadline_missed_total{model_name="test-model"} 1.0' in page


@pytest.mark.parametrize("server", [{}, {"request_timeout": 0.2}])
async def test_a_deadline_while_the_prompt_is_read_is_504_then_and_not_later(
    server: dict[str, Any],
) -> None:
    engine = FakeEngine()
    gone = asyncio.Event()

    async def encode(text: str, *, add_special_tokens: bool = True, tenant: str | None = None) -> list[int]:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            gone.set()
        return []

    engine.encode = encode  # type: ignore[method-assign]
    fields = {} if server else {"deadline_ms": 200}
    async with server_url(engine, **server) as url:
        reply = await asyncio.wait_for(ask(url, "POST", "/v1/completions", {"prompt": "abc", **fields}), 10)
    assert error_of(reply) == (504, "timeout_error", "deadline_exceeded")
    assert "0.2 s" in reply.json()["error"]["message"]
    assert gone.is_set()
    assert engine.requests == []
    assert (engine.metrics.deadlines_missed, engine.metrics.requests_rejected["deadline_exceeded"]) == (1, 1)


async def test_arrival_and_deadline_are_taken_once_by_the_clock_of_the_engine() -> None:
    engine = FakeEngine()
    began = engine.now()
    async with server_url(engine) as url:
        await ask(url, "POST", "/v1/completions", {"prompt": ["abc", "d"], "deadline_ms": 5000, "n": 2})
    assert len(engine.requests) == 4
    ((arrival, deadline),) = {(request.arrival_time, request.deadline) for request in engine.requests}
    assert arrival is not None
    assert began < arrival < engine.now()
    assert deadline == arrival + 5.0


async def test_a_deadline_after_the_first_byte_is_an_event() -> None:
    hold = Hold(4)
    async with running_engine(before=hold) as harness, server_url(harness.engine) as url:
        reply = await generate(url, "x", stream=True, deadline_ms=400)
        hold.go()
    events = events_of(reply.body)
    assert reply.status == 200
    assert events[0]["choices"][0]["finish_reason"] is None
    assert events[-1]["error"]["code"] == "deadline_exceeded"


async def test_a_wait_longer_than_the_queue_timeout_is_503() -> None:
    hold, limits = Hold(2), EngineLimits(queue_timeout_s=0.2)
    async with (
        running_engine(ONE_SEAT, before=hold, limits=limits) as harness,
        server_url(harness.engine) as url,
    ):
        running = generate(url, "a", 3)
        await hold.begun()
        reply = await generate(url, "b", 3, stream=True)
        hold.go()
        assert (await running).status == 200
    assert error_of(reply) == (503, "overloaded_error", "queue_timeout")
    assert int(reply.headers["retry-after"]) >= 1


async def test_choices_of_one_prompt_compute_it_once() -> None:
    scheduled: list[int] = []
    prompt = list(range(40))
    async with (
        running_engine(before=lambda inputs: scheduled.append(len(inputs.token_ids))) as harness,
        server_url(harness.engine) as url,
    ):
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "n": 4}
        reply = await ask(url, "POST", PATH, body)
    assert len({choice["text"] for choice in reply.json()["choices"]}) == 1
    assert sum(scheduled) < 2 * len(prompt)


async def test_a_shared_prefix_is_reported_as_cached_until_it_is_reset() -> None:
    shape = EngineShape(prefix_caching=True)
    body = {"prompt": list(range(40)), "max_tokens": 4, "temperature": 0}
    async with running_engine(shape) as harness, server_url(harness.engine) as url:

        async def cached(**fields: Any) -> int:
            usage = (await ask(url, "POST", PATH, {**body, **fields})).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(), await cached(), await cached(cache_salt="mine")] == [0, 36, 0]
        assert harness.engine.gauges().kv_blocks_cached == 20
        page = (await ask(url, "GET", "/metrics")).body.decode()
        assert (await ask(url, "POST", "/reset_prefix_cache")).json() == {"num_freed_blocks": 20}
        assert await cached() == 0
    for name, count in (
        ("prompt_tokens_cached", 36),
        ("prefix_cache_hits", 36),
        ("prefix_cache_queries", 120),
    ):
        assert f'slipstream_{name}_total{{model_name="test-model"}} {count}.0' in page


async def test_a_stream_s_requests_are_forgotten_when_it_ends() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        wire = await Wire.connect(url)
        body = {"prompt": PROMPT, "max_tokens": 120, "stream": True}
        await wire.send("POST", PATH, json.dumps(body).encode(), {"x-request-id": "gone"})
        await wire.head()
        await wire.close()
        async with asyncio.timeout(5):
            while (await ask(url, "GET", "/v1/requests/gone")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await ask(url, "POST", "/reset_prefix_cache")).json() == {"num_freed_blocks": 0}
