"""What a person reads on a terminal: units, plurals, and no percentile that nothing stands behind."""

from dataclasses import replace
from typing import Any

import pytest

from engine import Activity, BatchMetrics, EngineGauges, EngineInfo, FormulaTerms, Histogram
from engine.plan.step_records import BatchDecision, ScheduledRequest
from server.observability.terminal_rows import report_rows, request_row, spread, start_rows
from server.plain_words import counted, duration

CHAT: dict[str, Any] = {
    "route": "/v1/chat/completions",
    "code": 200,
    "ms": 1001.8,
    "choices": 1,
    "prompt_tokens": 36,
    "completion_tokens": 41,
    "cached_tokens": 0,
    "ttft_ms": 134.1,
    "generation_ms": 866.5,
    "finish_reason": "stop",
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.00044, "0.4 ms"),
        (0.0871, "87 ms"),
        (0.9999, "1.0 s"),
        (6.88, "6.9 s"),
        (48.2, "48 s"),
        (130, "2 min"),
        (9000, "2.5 h"),
    ],
)
def test_a_time_is_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_noun_agrees_with_its_number() -> None:
    assert (counted(1, "request"), counted(1200, "request")) == ("1 request", "1,200 requests")
    assert (counted(0, "retry", "retries"), counted(1, "retry", "retries")) == ("0 retries", "1 retry")


def test_a_request_is_one_row() -> None:
    assert request_row(CHAT) == (
        "chat        200  36 tokens in, 41 out, 1.0 s, first after 134 ms, 46 tokens/s"
    )
    assert request_row(CHAT | {"route": "/v1/messages"}).startswith("messages    200  36 tokens in")
    one = CHAT | {"prompt_tokens": 1, "completion_tokens": 1, "generation_ms": 0.0, "cached_tokens": 0}
    assert request_row(one) == "chat        200  1 token in, 1 out, 1.0 s, first after 134 ms"


def test_how_a_request_ended_is_in_words() -> None:
    cut = CHAT | {"finish_reason": "length,stop", "cached_tokens": 32}
    assert "36 tokens in (32 cached)" in request_row(cut)
    assert request_row(cut).endswith(", cut at its limit")
    left = CHAT | {"code": 499, "finish_reason": "abort", "ttft_ms": None, "completion_tokens": 0}
    assert request_row(left) == "chat        499  36 tokens in, 0 out, 1.0 s, given up"
    refused = {"route": "/v1/completions", "code": 503, "ms": 0.4, "error": "queue_full"}
    assert request_row(refused) == "completion  503  0.4 ms, queue_full"


def of(*seconds: float) -> str:
    histogram = Histogram((0.01, 0.1, 1.0, 10.0))
    for each in seconds:
        histogram.observe(each)
    return spread(histogram)


def test_percentiles_are_told_of_as_many_as_have_them() -> None:
    assert of(0.0868) == "87 ms"
    assert of(0.05, 0.06) == "55 ms on average"
    assert of(*[0.05] * 10) == "50 ms on average (half within 55 ms)"
    assert of(*[5.0] * 100) == "5.0 s on average (half within 5.5 s, 99% within 9.9 s)"


def activity(*, requests: int) -> Activity:
    metrics = BatchMetrics()
    scheduled = tuple(ScheduledRequest(f"d{i}", 9, 1, True) for i in range(4))
    for second in range(10):
        metrics.begin_step(100.0 + second)
        metrics.end_step(BatchDecision(1, scheduled, None, 4, 0), 0.5, 0.5, 0.25)
        metrics.generation_tokens += 4
    return metrics.since_first_step(120.0)._replace(num_ended=requests)


def test_the_report_reads_well() -> None:
    metrics = BatchMetrics()
    gauges = EngineGauges(0, 0, 0, 0, 0, 0, 0.0, 4.0, 0.75, 1.5, FormulaTerms(0.8, 4, 0.2))
    assert report_rows(activity(requests=1), metrics.speculation, gauges) == [
        "1 request in 20 s",
        "tokens       40 generated, 0 of prompts read",
        "speed        2.0 tokens/s, 8.0 while busy",
        "busy         25% of the time, 4.0 requests at once",
        "K/V in use   25% while busy",
    ]
    metrics.speculation.observe_round("ngram", 4, 3, 4)
    head, *_, drafts = report_rows(activity(requests=1200), metrics.speculation, gauges)
    assert head == "1,200 requests in 20 s"
    assert drafts == (
        "drafts       75% of 4 were right; of late 1.50 times the speed without, 1.87 by formula"
    )


def test_the_start_says_what_is_served_on_what_and_where() -> None:
    info = EngineInfo(
        max_model_len=8192,
        vocab_size=9,
        dtype="bfloat16",
        device="cpu",
        num_kv_blocks=2912,
        kv_block_size=16,
        kv_bytes=1023 * 2**20,
        has_chat_template=True,
        compute_threads="1: a step takes 9.0 ms with 1, 12.0 ms with 2",
        kernels="compiled for this CPU",
        kv_dtype="bfloat16",
        weight_bytes={"Q4_K": 80 * 2**20, "F32": 2**20},
    )
    assert start_rows("tiny", "http://h:1", info, 3.21) == [
        "ready after 3.2 s; Ctrl-C ends it",
        "model        tiny, bfloat16; weights: 80 MiB Q4_K, 1 MiB F32",
        "device       CPU, 1 thread; kernels: compiled for this CPU",
        "K/V room     46,592 tokens (1.00 GiB), up to 8,192 a request",
        "API          http://h:1/v1",
        "status page  http://h:1/",
    ]
    plain = replace(info, kv_dtype="int8", weight_bytes={})
    _, model, _, room, *_ = start_rows("tiny", "http://h:1", plain, 3.21)
    assert (model, room) == (
        "model        tiny, bfloat16",
        "K/V room     46,592 tokens (1.00 GiB in int8), up to 8,192 a request",
    )
