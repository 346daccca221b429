"""`slipstream bench` against servers on real sockets."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from engine import FormulaTerms, Overloaded, SpecStats
from server.commands.bench.command import measure
from server.commands.bench.draft_speedup import DraftSpeedup, read_draft_speedup
from server.commands.bench.flags import read_plan
from server.commands.bench.result import BenchResult, make_report
from server.commands.bench.tables import show_result
from server.commands.remote.address import read_address
from server.commands.remote.http_client import HttpClient
from tests.e2e.command_line import QUIET, SLIPSTREAM, command, fast_engine
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.real_engine import real_engine
from tests.e2e.scripted_server import DONE, chunk, event, json_reply, reply, scripted_server
from tests.support.tiny_models import save_tiny_model

CACHE = "of the prompts came from the server's prefix cache"


async def bench(url: str, *flags: str) -> BenchResult:
    return await measure(read_plan(["--url", url, *flags]), [])


async def test_bench_counts_what_the_server_counts() -> None:
    engine = fast_engine()
    async with server_url(engine) as url:
        result = await bench(url, "--num-requests", "12", "--concurrency", "4", "--output-tokens", "5-9")
    summary = result.summary
    assert (summary.num_requests, summary.num_succeeded, summary.num_failed) == (12, 12, 0)
    assert summary.counted_by == "usage"
    # The warm-up is the engine's first request and nobody's figure.
    assert len(engine.requests) == 13
    measured = engine.requests[1:]
    assert summary.output_tokens == sum(request.sampling.max_tokens for request in measured)
    assert {request.sampling.max_tokens for request in measured} <= set(range(5, 10))
    assert summary.input_tokens == sum(len(request.prompt_token_ids) for request in measured)
    assert summary.ttft_ms.count == summary.end_to_end_ms.count == 12
    assert summary.inter_token_ms.count == sum(request.sampling.max_tokens - 1 for request in measured)
    assert 0 < summary.ttft_ms.p50 <= summary.end_to_end_ms.p50
    assert result.model == MODEL
    assert summary.drafts is not None and summary.drafts.num_proposed == 0


async def test_a_closed_loop_keeps_so_many_running_and_no_more() -> None:
    most = 0

    async def gate(_: int) -> None:
        nonlocal most
        most = max(most, engine.num_open)
        await asyncio.sleep(0.001)

    engine = fast_engine(gate=gate)
    async with server_url(engine) as url:
        await bench(url, "--num-requests", "20", "--concurrency", "5", "--output-tokens", "6")
    assert most == 5


async def test_equal_seeds_ask_equal_things() -> None:
    asked = []
    for seed in ("3", "3", "4"):
        engine = fast_engine()
        async with server_url(engine) as url:
            flags = ("--num-requests", "4", "--concurrency", "1", "--seed", seed, "--input-tokens", "8-30")
            await bench(url, *flags, "--shared-prefix-tokens", "6", "--endpoint", "completions")
        asked.append([bytes(map(int, request.prompt_token_ids)).decode() for request in engine.requests])
    assert asked[0] == asked[1] != asked[2]
    prefixes = {" ".join(text.split()[:6]) for text in asked[0]}
    assert len(prefixes) == 1 and len(set(asked[0])) == 5


async def test_a_second_run_measures_the_prefix_cache_only_where_it_is_asked_to(tmp_path: Path) -> None:
    def told(result: BenchResult) -> str:
        console = Console(file=io.StringIO(), width=200)
        show_result(result, console)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    flags = (
        *("--num-requests", "3", "--warmup", "0", "--concurrency", "1", "--endpoint", "completions"),
        *("--input-tokens", "100", "--output-tokens", "2"),
    )
    async with real_engine(save_tiny_model("llama", tmp_path)) as engine, server_url(engine) as url:
        first = await bench(url, *flags)
        second = await bench(url, *flags)
        third = await bench(url, *flags, "--seed", str(second.plan.workload.seed))
    seeds = [result.plan.workload.seed for result in (first, second, third)]
    assert seeds[0] != seeds[1] == seeds[2]
    assert f"; --seed {seeds[1]} repeats it" in told(second)
    assert "0% of them cached (0)" in told(second) and CACHE not in told(second)
    share = (third.summary.cached_tokens or 0) / (third.summary.input_tokens or 1)
    assert share > 0.8
    assert f"{share:.0%} of them cached" in told(third)
    assert f"Warning: {share:.0%} {CACHE}" in told(third)


async def test_prompts_from_a_file_are_asked_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n{"prompt": "two", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "3"}]}\n'
    )
    engine = fast_engine()
    async with server_url(engine) as url:
        flags = ("--prompt-file", str(path), "--num-requests", "4", "--concurrency", "1", "--warmup", "0")
        assert await command("bench", "--url", url, *flags) == 0
    asked = ["".join(map(chr, request.prompt_token_ids)) for request in engine.requests]
    assert asked == ["<user>one", "<user>two", "<user>3", "<user>one"]
    assert [request.sampling.max_tokens for request in engine.requests] == [64, 3, 64, 64]


async def test_a_stall_shows_in_an_open_loop_in_full_and_hides_in_a_closed_one() -> None:
    """Coordinated omission: a client that waits for a stalled server asks nothing just when it is slow."""
    flowing = asyncio.Event()

    async def gate(_: int) -> None:
        await flowing.wait()

    async def stall() -> None:
        flowing.set()
        await asyncio.sleep(0.3)
        flowing.clear()
        await asyncio.sleep(0.5)
        flowing.set()

    shares = {}
    for flags in (("--rate", "60"), ("--concurrency", "1")):
        flowing.set()
        async with server_url(fast_engine(gate=gate)) as url:
            run = asyncio.create_task(
                bench(url, *flags, "--duration", "1", "--output-tokens", "1", "--slo-ttft-ms", "100")
            )
            staller = asyncio.create_task(stall())
            result = await run
            await staller
        assert result.summary.goodput is not None
        shares[flags[0]] = 1 - result.summary.goodput.share
    assert shares["--rate"] > 0.2
    assert shares["--concurrency"] < 0.1


async def test_open_loop_times_count_from_when_a_request_was_due_however_late_it_was_sent() -> None:
    async with server_url(fast_engine()) as url:
        # The stall is this very loop's: nothing can be sent while it lasts.
        asyncio.get_running_loop().call_later(0.4, time.sleep, 0.3)
        result = await bench(url, "--rate", "50", "--duration", "1", "--output-tokens", "1", "--warmup", "0")
    late = [record for record in result.records if record.sent - record.due > 0.1]
    assert late
    assert all(record.ttft_s is not None and record.ttft_s >= record.sent - record.due for record in late)
    assert result.summary.ttft_ms.max > 200
    assert result.client.loop_lag_ms.max > 100


async def test_refusals_are_counted_by_status_and_code_with_what_retry_after_asked() -> None:
    refusal = Overloaded("The queue is full.", code="queue_full", retry_after_s=7)
    async with server_url(fast_engine(refusal=refusal)) as url:
        result = await bench(url, "--num-requests", "6", "--concurrency", "3", "--warmup", "0")
        assert await command("bench", "--url", url, "--num-requests", "1", "--warmup", "0") == 1
    (error,) = result.summary.errors
    assert (error.kind, error.count, error.retry_after_s) == ("503 queue_full", 6, 7.0)
    assert "The queue is full." in error.message
    assert result.summary.num_succeeded == 0


OVERLOADED = json_reply(
    {"error": {"message": "later", "type": "overloaded_error", "code": "queue_full"}},
    "503 Service Unavailable",
    "retry-after-ms: 30",
)
GOOD = reply(chunk("a") + chunk("b", "stop") + DONE, "200 OK", "content-type: text/event-stream")
ONCE = ("--model", "m", "--num-requests", "1", "--warmup", "0")


async def test_a_retry_waits_as_asked_and_counts_into_the_latency() -> None:
    # The first request is for /tokenize, the second for /version.
    async with scripted_server(
        reply(b"", "404 Not Found"), reply(b"", "404 Not Found"), OVERLOADED, GOOD
    ) as script:
        result = await bench(script.url, *ONCE, "--retry", "2")
    (record,) = result.records
    assert record.succeeded and record.num_retries == 1
    assert record.ttft_s is not None and record.ttft_s >= 0.03
    assert not result.is_input_measured


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply(chunk("a")), "stream cut short"),
        (
            reply(chunk("a") + event(error={"message": "no", "code": "deadline_exceeded"}) + DONE),
            "error event deadline_exceeded",
        ),
        (reply(b"data: {nonsense\n\n"), "event without JSON"),
        (reply(b"data: [1]\n\n"), "event without JSON"),
        (reply(event(choices=[7]) + DONE), "unknown event"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhalf", "reply cut short"),
        (b"", "connection closed"),
        (reply(b"<h1>Bad gateway</h1>", "502 Bad Gateway"), "502"),
        (json_reply({"error": "text"}, "500 Internal Server Error"), "500"),
        (
            json_reply({"object": "error", "message": "m", "type": "BadRequest", "code": 400}, "400 Bad"),
            "400 BadRequest",
        ),
    ],
)
async def test_every_failure_has_a_name_to_count_it_by(answer: bytes, kind: str) -> None:
    async with scripted_server(reply(b"", "404 Not Found"), reply(b"", "404 Not Found"), answer) as script:
        result = await bench(script.url, *ONCE)
    assert [error.kind for error in result.summary.errors] == [kind]


async def test_a_server_without_usage_is_counted_by_chunks_in_any_framing() -> None:
    crlf = (chunk("a") + b": ping\n\n" + chunk("b") + chunk("", "length")).replace(b"\n", b"\r\n")
    answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + crlf  # neither length nor [DONE]
    async with scripted_server(reply(b"", "404 Not Found"), reply(b"", "404 Not Found"), answer) as script:
        result = await bench(script.url, *ONCE)
    summary = result.summary
    assert (summary.output_tokens, summary.counted_by, summary.num_failed) == (2, "chunks", 0)
    assert summary.finish_reasons == {"length": 1}
    assert summary.drafts is None and summary.input_tokens is None


async def test_a_request_that_takes_too_long_is_a_failure() -> None:
    async with server_url(fast_engine(gate=lambda _: asyncio.sleep(30))) as url:
        result = await bench(url, "--num-requests", "1", "--warmup", "0", "--timeout", "0.1")
    assert [error.kind for error in result.summary.errors] == ["timeout"]


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async with scripted_server(reply(b"{}"), reply(b"{}"), GOOD, b"", GOOD) as script:
        result = await bench(
            script.url, "--model", "m", "--num-requests", "2", "--concurrency", "1", "--warmup", "0"
        )
    assert result.summary.num_succeeded == 2
    assert script.num_connections == 2


async def test_prompts_are_as_long_as_asked_for_where_the_server_tokenizes() -> None:
    """A template of 10 tokens, two tokens a word: 50 tokens are 20 words."""
    answers = [json_reply({"count": 10 + 2 * num_words}) for num_words in (32, 160)]
    async with scripted_server(*answers, reply(b"", "404 Not Found"), GOOD) as script:
        result = await bench(script.url, *ONCE, "--input-tokens", "50")
    asked = json.loads(script.requests[-1][1])
    assert len(asked["messages"][0]["content"].split()) == 20
    assert result.is_input_measured


async def test_the_acceptance_of_drafts_is_shown() -> None:
    stats = SpecStats()
    stats.num_rounds, stats.proposed["ngram"], stats.accepted["ngram"] = 10, 40, 30
    engine = fast_engine(speculation=stats, draft_gauges=(3.5, 0.75, 1.25))
    engine.formula = FormulaTerms(alpha=0.8, gamma=4, cost_ratio=0.2)
    async with server_url(engine) as url:
        result = await bench(url, "--num-requests", "4")
    drafts = result.summary.drafts
    assert drafts is not None
    assert (drafts.num_steps, drafts.num_proposed, drafts.num_accepted) == (40, 160, 120)
    assert (drafts.acceptance_rate, drafts.tokens_per_step) == (0.75, 4.0)
    assert result.speedup is not None
    assert result.speedup.measured == 1.25
    assert result.speedup.by_formula == pytest.approx(3.3616 / 1.8)
    assert make_report(result)["server"]["draft_speedup"] == asdict(result.speedup)
    console = Console(file=io.StringIO(), width=200)
    show_result(result, console)
    assert "1.25 by drafts as the server measured it last, 1.87 by the formula" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "page",
    [
        json_reply({}, "401 Unauthorized"),
        reply(b"slipstream_speculation_speedup_ratio 1.5\n"),
        reply(
            b"slipstream_speculation_speedup_ratio much\nslipstream_speculation_theoretical_speedup_ratio 1\n"
        ),
        b"no HTTP",
    ],
    ids=["refused", "an older server", "no number", "no HTTP"],
)
async def test_a_server_that_does_not_tell_what_drafts_gain_is_not_asked_twice(page: bytes) -> None:
    async with scripted_server(page) as script:
        address = read_address(script.url, None, None)
        client = HttpClient(address)
        assert await read_draft_speedup(client, address) is None
        client.close()
    assert len(script.requests) == 1


async def test_the_gains_of_several_replicas_are_one() -> None:
    lines = [
        f'slipstream_speculation_{name}_ratio{{replica="{replica}",model_name="m"}} {value}'
        for name, values in (("speedup", (1.0, 2.0)), ("theoretical_speedup", (2.0, 3.0)))
        for replica, value in enumerate(values)
    ]
    async with scripted_server(reply("\n".join(lines).encode())) as script:
        address = read_address(script.url, None, None)
        client = HttpClient(address)
        assert await read_draft_speedup(client, address) == DraftSpeedup(1.5, 2.5)
        client.close()


async def test_the_report_is_json_with_all_that_one_must_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    async with server_url(fast_engine()) as url:
        flags = ["--num-requests", "5", "--slo-ttft-ms", "1000", "--json", str(path), "--plot", str(plot)]
        assert await command("bench", "--url", url, "--api-key", "s3cret", *flags) == 0
        assert await command("bench", "--url", url, "--num-requests", "5", "--json", "-") == 0
    out, err = capsys.readouterr()
    table, _, printed = out.partition("{")
    assert (
        "5 requests in" in table
        and "to first token" in table
        and "within the limits (5 of them, 100%)" in table
    )
    assert json.loads("{" + printed)["summary"]["num_succeeded"] == 5
    assert "5 requests in" in err  # beside JSON on stdout, the table goes elsewhere
    report = json.loads(path.read_text())
    assert "s3cret" not in path.read_text()
    assert set(report) == {
        "format",
        "began",
        "interrupted",
        "server",
        "settings",
        "client",
        "summary",
        "requests",
    }
    assert set(report["client"]) == {"machine", "versions", "cpu_share", "loop_lag_ms"}
    assert set(report["summary"]["ttft_ms"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert report["settings"]["load"]["concurrency"] == 8
    assert report["server"]["url"] == f"{url}/v1"
    assert len(report["requests"]) == 5
    for request in report["requests"]:
        assert 0 <= request["due"] <= request["sent"] < request["chunk_times"][0] <= request["ended"]
        assert len(request["chunk_times"]) == request["output_tokens"] == 64
        assert request["error"] is None and request["good"]
    assert plot.read_text().lstrip().startswith("<?xml")


async def test_a_warm_up_that_fails_ends_the_run_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    async with server_url(fast_engine()) as url:
        assert await command("bench", "--url", url, "--model", "other") == 1
    assert await command("bench", "--url", url) == 1
    out, err = capsys.readouterr()
    assert out == ""
    missing, gone = err.splitlines()
    assert missing.startswith("slipstream: bench: HTTP 404: The model 'other' does not exist")
    assert gone.startswith("slipstream: bench: cannot connect to 127.0.0.1:") and "connection refused" in gone


async def test_ctrl_c_shows_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    under_way = asyncio.Event()

    async def gate(_: int) -> None:
        if len(engine.requests) > 20:
            under_way.set()
        await asyncio.sleep(0.002)

    engine = fast_engine(gate=gate)
    async with server_url(engine) as url:
        flags = (
            "--num-requests",
            "100000",
            "--concurrency",
            "4",
            "--output-tokens",
            "20",
            "--json",
            str(path),
        )
        process = await asyncio.create_subprocess_exec(
            *SLIPSTREAM,
            *("bench", "--url", url, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=QUIET,
        )
        try:
            await asyncio.wait_for(under_way.wait(), 30)
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.wait_for(process.communicate(), 30)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 130, err
    assert b"interrupted" in out and b"cut off" in out and b"to first token" in out
    assert b"Traceback" not in err
    report = json.loads(path.read_text())
    assert report["interrupted"]
    cut_off = [each for each in report["requests"] if each["ended"] is None and each["error"] is None]
    assert 1 <= len(cut_off) == report["summary"]["num_cut_off"] <= 4
