"""A server of its own process whose log nobody reads, with a collector for its traces."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command_line import QUIET, SLIPSTREAM
from tests.e2e.otlp_collector import collector
from tests.e2e.wire import ask
from tests.support.tiny_models import save_tiny_model

PATH = "/v1/completions"


async def flood(url: str, num_lines: int) -> None:
    """Serve a request, then have so many lines written while /health answers."""
    body, headers = {"prompt": "a", "max_tokens": 2}, {"x-request-id": "find-me"}
    assert (await ask(url, "POST", PATH, body, headers)).status == 200
    for _ in range(num_lines // 20):
        refused = (ask(url, "POST", PATH, {"prompt": "a", "model": "x" * 90}) for _ in range(20))
        async with asyncio.timeout(20):
            health, *_ = await asyncio.gather(ask(url, "GET", "/health"), *refused)
        assert health.status == 200


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nothing_and_traces_leave_before_the_end(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    with collector() as (endpoint, got):
        process = subprocess.Popen(
            [*SLIPSTREAM, "serve", str(model), "--port", "0", "--log-format", "json"],
            stderr=subprocess.PIPE,
            text=True,
            env={**QUIET, "SLIPSTREAM_HOME": str(tmp_path), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        )
        assert process.stderr is not None
        with process, process.stderr:
            try:
                found = None
                while not (line := process.stderr.readline()).count("serving "):
                    found = re.search(r"listening on (\S+) ", json.loads(line)["event"]) or found
                assert found is not None
                asyncio.run(flood(found[1], 2000))  # a pipe takes some 300 lines
                process.terminate()
                assert process.wait(30) == 0
                assert "find-me" in process.stderr.read()
            finally:
                process.kill()
    assert {path for path, _ in got} == {"/v1/traces"}
    assert b"find-me" in b"".join(body for _, body in got)
