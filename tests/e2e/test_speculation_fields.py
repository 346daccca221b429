"""Speculation from outside: request fields, what a reply tells of it, and its metrics, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import FormulaTerms, SpecStats, SpeculationOptions
from tests.e2e.http_server import server_url
from tests.e2e.wire import RawReply, Wire, ask, events_of
from tests.support.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
}


def make_stats() -> SpecStats:
    """Two rounds of the caller's prediction, one of n-grams."""
    stats = SpecStats()
    stats.observe_round("prediction", 4, 4, 5)
    stats.observe_round("prediction", 4, 1, 2)
    stats.observe_round("ngram", 2, 0, 1)
    return stats


async def options_of(**fields: Any) -> SpeculationOptions:
    """What reaches the engine with these fields on either endpoint."""
    engine = FakeEngine()
    async with server_url(engine, strict_params=True) as url:
        for path, body in BODIES.items():
            reply = await ask(url, "POST", path, {**body, **fields})
            assert reply.status == 200, reply.body
    first, second = (request.speculation for request in engine.requests)
    assert first == second
    return first


async def refusal_of(path: str, engine: FakeEngine | None = None, **fields: Any) -> tuple[str, str]:
    """The `param` and message of the 400 that these fields get before anything is submitted."""
    engine = engine or FakeEngine()
    async with server_url(engine) as url:
        reply = await ask(url, "POST", path, {**BODIES[path], **fields})
    error = reply.json()["error"]
    assert (reply.status, error["type"], engine.requests) == (400, "invalid_request_error", []), error
    return error["param"], error["message"]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (None, SpeculationOptions()),
        ({}, SpeculationOptions()),
        ({"method": None, "num_tokens": None, "enabled": None}, SpeculationOptions()),
        ({"enabled": True}, SpeculationOptions()),
        ({"enabled": False}, SpeculationOptions(enabled=False)),
        ({"method": "none"}, SpeculationOptions(enabled=False)),
        ({"method": "none", "enabled": True}, SpeculationOptions(enabled=False)),
        ({"method": "auto"}, SpeculationOptions()),
        ({"method": "suffix"}, SpeculationOptions(method="suffix")),
        ({"num_tokens": 1}, SpeculationOptions(num_tokens=1)),
        ({"length_policy": "fixed"}, SpeculationOptions(length_policy="fixed")),
        ({"num_tokens": 8, "method": "ngram"}, SpeculationOptions(method="ngram", num_tokens=8)),
    ],
)
async def test_speculation_reaches_the_engine(asked: object, options: SpeculationOptions) -> None:
    assert await options_of(speculation=asked) == options


@pytest.mark.parametrize("name", ["draft_model", "draft-model"])
async def test_a_draft_model_is_named_either_way(name: str) -> None:
    engine = FakeEngine(draft_methods=("ngram", "draft_model"))
    async with server_url(engine) as url:
        await ask(url, "POST", COMPLETIONS, {"prompt": "a", "speculation": {"method": name}})
    assert engine.requests[0].speculation.method == "draft_model"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (True, "speculation"),
        ("ngram", "speculation"),
        ([], "speculation"),
        ({"num_tokens": 0}, "speculation.num_tokens"),
        ({"num_tokens": 9}, "speculation.num_tokens"),
        ({"num_tokens": 2**40}, "speculation.num_tokens"),
        ({"num_tokens": True}, "speculation.num_tokens"),
        ({"num_tokens": "4"}, "speculation.num_tokens"),
        ({"num_tokens": 4.0}, "speculation.num_tokens"),
        ({"enabled": 1}, "speculation.enabled"),
        ({"enabled": "false"}, "speculation.enabled"),
        ({"length_policy": "best"}, "speculation.length_policy"),
        ({"method": 5}, "speculation.method"),
        ({"method": ""}, "speculation.method"),
        ({"method": "medusa"}, "speculation.method"),
        ({"method": "x" * 129}, "speculation.method"),
    ],
)
async def test_a_wrong_speculation_is_named(path: str, asked: object, param: str) -> None:
    assert (await refusal_of(path, speculation=asked))[0] == param


async def test_a_method_that_is_not_there_is_told_what_is() -> None:
    _, message = await refusal_of(COMPLETIONS, speculation={"method": "medusa"})
    assert (
        message == "'speculation.method' is 'medusa'; this server has auto, none, ngram, suffix, prediction."
    )
    _, message = await refusal_of(COMPLETIONS, speculation={"num_tokens": 9})
    assert message == "'speculation.num_tokens' is 9; the limit is 8."


async def test_limits_are_checked_before_anything_is_tokenized() -> None:
    engine = FakeEngine(draft_methods=(), max_draft_tokens=0)
    for asked in ({"method": "ngram"}, {"num_tokens": 1}):
        await refusal_of(
            COMPLETIONS, engine, speculation=asked, prediction={"type": "content", "content": "a"}
        )
    assert engine.num_encoded == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("bcd", "bcd"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "b\n"}, {"type": "text", "text": "cd"}], "b\ncd"),
    ],
)
async def test_a_prediction_is_tokenized_for_the_drafter(content: object, text: str) -> None:
    options = await options_of(
        prediction={"type": "content", "content": content}, speculation={"num_tokens": 2}
    )
    assert options == SpeculationOptions(num_tokens=2, prediction=tuple(map(ord, text)))


async def test_a_prediction_is_taken_where_nothing_is_drafted() -> None:
    engine = FakeEngine(draft_methods=(), max_draft_tokens=0)
    async with server_url(engine) as url:
        body = {"prompt": "a", "prediction": {"type": "content", "content": "b"}}
        reply = await ask(url, "POST", COMPLETIONS, body)
    assert reply.json()["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        (["text"], "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": {"text": "a"}}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": 1}]}, "prediction.content"),
    ],
)
async def test_a_wrong_prediction_is_named(path: str, prediction: object, param: str) -> None:
    assert (await refusal_of(path, prediction=prediction))[0] == param


@pytest.mark.parametrize(
    "engine", [FakeEngine(max_model_len=64), FakeEngine(max_model_len=64, char_limit=64)]
)
@pytest.mark.parametrize("path", BODIES)
async def test_a_prediction_longer_than_the_context_is_refused(path: str, engine: FakeEngine) -> None:
    async with server_url(engine) as url:
        body = {**BODIES[path], "prediction": {"type": "content", "content": "a" * 65}}
        error = (await ask(url, "POST", path, body)).json()["error"]
        assert (error["param"], error["code"]) == ("prediction", "context_length_exceeded")
        assert (
            error["message"]
            == "'prediction' is longer than this model's maximum context length of 64 tokens."
        )
        body["prediction"]["content"] = "a" * 64
        assert (await ask(url, "POST", path, body)).status == 200


async def test_a_reply_tells_what_was_drafted_for_it() -> None:
    async with server_url(FakeEngine(speculation=make_stats())) as url:
        for path, body in BODIES.items():
            found = (await ask(url, "POST", path, body)).json()
            assert "completion_tokens_details" not in found["usage"]
            assert found["metrics"]["speculative_decoding"] == {
                "mean_acceptance_length": 2.6667,
                "draft_acceptance_rate": 0.5,
                "acceptance_histogram": [1, 1, 0, 0, 1],
                "num_spec_steps": 3,
                "num_draft_tokens": 10,
                "num_accepted_draft_tokens": 5,
            }


async def test_choices_are_told_of_together() -> None:
    async with server_url(FakeEngine(speculation=make_stats())) as url:
        reply = await ask(url, "POST", COMPLETIONS, {**BODIES[COMPLETIONS], "n": 2})
    speculation = reply.json()["metrics"]["speculative_decoding"]
    assert (speculation["num_spec_steps"], speculation["num_draft_tokens"]) == (6, 20)
    assert speculation["acceptance_histogram"] == [2, 2, 0, 0, 2]
    assert speculation["mean_acceptance_length"] == 2.6667


async def test_usage_tells_what_became_of_the_prediction() -> None:
    prediction = {"type": "content", "content": "abc"}
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}
    async with server_url(FakeEngine(speculation=make_stats())) as url:
        for path, body in BODIES.items():
            whole = (await ask(url, "POST", path, {**body, "prediction": prediction})).json()
            assert whole["usage"]["completion_tokens_details"] == details
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = await stream(
                url, path, {**body, "prediction": prediction, "stream": True, "stream_options": options}
            )
            found = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
            assert found[0] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
            assert found[-2:] == [details, details]
            assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


async def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chunk of a streamed reply."""
    wire = await Wire.connect(url)
    await wire.send("POST", path, json.dumps(body).encode())
    await wire.head()
    chunks = events_of(b"".join(await wire.chunks()))
    await wire.close()
    return chunks


async def scrape(url: str) -> tuple[RawReply, dict[str, dict[str, float]]]:
    """Samples of every speculation family by name, then by the value of their own label."""
    reply = await ask(url, "GET", "/metrics")
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            own = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found.setdefault(sample.name.removeprefix("slipstream_"), {})["".join(own.values())] = (
                sample.value
            )
    return reply, found


METHODS = ("ngram", "suffix", "prediction", "draft_model", "medusa", "heads", "mtp")


async def test_every_label_is_at_zero_before_the_first_draft() -> None:
    async with server_url(FakeEngine()) as url:
        _, found = await scrape(url)
    positions = tuple(map(str, range(32)))
    for name, labels in (
        ("spec_decode_num_drafts_total", ("",)),
        ("spec_decode_n1_fallbacks_total", ("",)),
        ("spec_decode_num_draft_tokens_total", METHODS),
        ("spec_decode_num_accepted_tokens_total", METHODS),
        ("spec_decode_num_accepted_tokens_per_pos_total", positions),
        ("spec_decode_draft_tokens_dropped_total", ("stale", "cancelled", "error", "late")),
        ("spec_decode_run_ahead_total", ("hit", "lane", "miss")),
        ("speculation_draft_length", ("",)),
        ("speculation_acceptance_ratio", ("",)),
        ("draft_duration_seconds_count", ("",)),
        ("verify_duration_seconds_count", ("",)),
    ):
        assert found[name] == dict.fromkeys(labels, 0.0), name
    for name in ("speculation_speedup_ratio", "speculation_theoretical_speedup_ratio"):
        assert found[name] == {"": 1.0}, "as fast as without drafts"


async def test_metrics_show_what_was_drafted() -> None:
    engine = FakeEngine(draft_gauges=(3.5, 0.75, 1.25), formula=FormulaTerms(0.5, 1, 0.25))
    metrics = engine.metrics
    metrics.speculation = make_stats()
    metrics.speculation.dropped["late"] = 7
    metrics.speculation.run_ahead.update(hit=6, lane=2)
    metrics.speculation.num_fallbacks = 5
    metrics.draft_duration.observe(0.00002, times=3)
    metrics.verify_duration.observe(0.03)
    async with server_url(engine) as url:
        _, found = await scrape(url)
    assert found["spec_decode_num_drafts_total"] == {"": 3}
    assert found["spec_decode_num_draft_tokens_total"] == {
        **dict.fromkeys(METHODS, 0),
        "prediction": 8,
        "ngram": 2,
    }
    assert found["spec_decode_num_accepted_tokens_total"]["prediction"] == 5
    positions = found["spec_decode_num_accepted_tokens_per_pos_total"]
    assert [positions[str(i)] for i in range(5)] == [2, 1, 1, 1, 0]
    assert found["spec_decode_draft_tokens_dropped_total"] == {
        "stale": 0,
        "cancelled": 0,
        "error": 0,
        "late": 7,
    }
    assert found["spec_decode_run_ahead_total"] == {"hit": 6, "lane": 2, "miss": 0}
    assert found["spec_decode_n1_fallbacks_total"] == {"": 5}
    assert found["speculation_draft_length"] == {"": 3.5}
    assert found["speculation_acceptance_ratio"] == {"": 0.75}
    assert found["speculation_speedup_ratio"] == {"": 1.25}
    assert found["speculation_theoretical_speedup_ratio"] == {"": 1.2}
    buckets = found["draft_duration_seconds_bucket"]
    assert (buckets["1e-05"], buckets["2.5e-05"], buckets["+Inf"]) == (0, 3, 3)
    assert found["verify_duration_seconds_sum"] == {"": 0.03}


async def test_metrics_show_who_drafts() -> None:
    engine = FakeEngine(draft_methods=("ngram", "heads"))
    async with server_url(engine) as url:
        _, on = await scrape(url)
        engine.no_drafts_because = "It has failed."
        _, off = await scrape(url)
    assert on["speculation_enabled"] == {**dict.fromkeys(METHODS, 0), "ngram": 1, "heads": 1}
    assert off["speculation_enabled"] == dict.fromkeys(METHODS, 0)


async def test_a_draft_deeper_than_any_is_no_new_series() -> None:
    engine = FakeEngine()
    engine.metrics.speculation.observe_round("medusa", 40, 40, 41)
    async with server_url(engine) as url:
        _, found = await scrape(url)
    assert found["spec_decode_num_accepted_tokens_per_pos_total"] == {str(i): 1 for i in range(32)}


async def test_the_openapi_document_shows_both_fields() -> None:
    async with server_url(FakeEngine()) as url:
        document = (await ask(url, "GET", "/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"method", "num_tokens", "enabled", "length_policy"} == schemas["Speculation"]["properties"].keys()
    assert schemas["SpeculationPatch"]["properties"].keys() == schemas["Speculation"]["properties"].keys()
    assert schemas["Prediction"]["required"] == ["type", "content"]
