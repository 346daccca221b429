"""Deadlines that will be missed: refused, with the time needed, or ended before they cost."""

from __future__ import annotations

import pytest

from engine.errors import DeadlineExceeded
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from tests.e2e.http_server import make_settings, served
from tests.e2e.wire import ask
from tests.support.engines import EngineShape, collect, running_engine
from tests.support.factories import make_request
from tests.unit.plan.scheduling.test_live_requests import learned

EOS = frozenset([300])  # no token of the fake model
BODY = {"prompt": [5, 6, 7], "max_tokens": 100}


async def test_a_refusal_says_when_it_would_have_been_done() -> None:
    async with running_engine(eos_token_ids=EOS) as harness, served(make_settings(), harness.engine) as url:
        batcher = learned(harness.parts.batcher)
        for _ in range(64):  # replies of a hundred tokens: a second of steps of 10 ms
            reply = make_request(max_tokens=200)
            reply.token_ids += [7] * 100
            reply.endpoint = "/v1/completions"
            batcher.replies.observe(reply)
        refused = await ask(url, "POST", "/v1/completions", {**BODY, "deadline_ms": 200})
        assert (refused.status, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert refused.headers["x-should-retry"] == "false"
        assert 500 < int(refused.headers["x-estimated-completion-ms"]) < 2500
        assert int(refused.headers["retry-after"]) in (1, 2)
        assert harness.engine.metrics.requests_rejected == {"deadline_exceeded": 1}


async def test_what_is_hopeless_when_it_gets_a_seat_is_ended_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine(EngineShape(max_num_seqs=1)) as harness:
        batcher = learned(harness.parts.batcher)
        monkeypatch.setattr(type(batcher), "can_meet", lambda *_, **__: True)  # as it was when it came
        asked = GenerationRequest(
            "late", [1, 2, 3], SamplingParams(max_tokens=100), deadline=harness.engine.now() + 0.5
        )
        finish = (await collect(harness.engine.submit(asked))).finish
        assert finish.reason is FinishReason.DEADLINE and isinstance(finish.error, DeadlineExceeded)
        assert (finish.num_output_tokens, harness.runner.num_steps) == (0, 0)
        assert harness.engine.metrics.deadlines_missed == 1
