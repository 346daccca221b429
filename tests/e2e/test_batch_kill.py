"""Killed without a word at random instants, a batch goes on with each start: every line is answered once."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from server.api.batches.store import BatchStore
from tests.bench.processes import free_port
from tests.e2e.server_process import ServerProcess, server_process
from tests.e2e.test_batches import client_of, jsonl, rows_of
from tests.e2e.test_life import EXIT_S, FLAGS
from tests.support.tiny_models import save_tiny_model

NUM_LINES = 100
WAIT_S = 60.0
ENDPOINT: Any = "/v1/completions"


def job() -> bytes:
    """Lines of several lengths, of which each tenth is refused."""
    rng = random.Random(5)
    lines = []
    for i in range(NUM_LINES):
        body = {
            "prompt": f"{i} Once upon",
            "max_tokens": rng.randrange(2, 16),
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"top_p": 7} if i % 10 == 3 else {}
        lines.append({"custom_id": f"r{i}", "method": "POST", "url": ENDPOINT, "body": body})
    return jsonl(lines)


async def finish(server: ServerProcess, batch_id: str) -> tuple[list[str], list[str]]:
    """The custom ids in the output and in the errors, once the batch has ended."""
    async with client_of(server.url) as client, asyncio.timeout(WAIT_S):
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        answered, refused = [
            [row["custom_id"] for row in await rows_of(client, name)]
            for name in (batch.output_file_id, batch.error_file_id)
        ]
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, len(answered), len(refused))
        return answered, refused


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_no_line_is_lost_or_answered_twice(tmp_path: Path, num_kills: int) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    rng, port = random.Random(num_kills), free_port()
    flags = (*FLAGS, "--max-num-seqs", "8")
    batch_id = ""
    for kill in range(num_kills):
        async with server_process(model, *flags, port=port) as server:
            if not batch_id:
                async with client_of(server.url) as client:
                    file = await client.files.create(file=("in", job()), purpose="batch")
                    batch = await client.batches.create(
                        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
                    )
                    batch_id = batch.id
            if kill % 4 != 3:  # else while it starts
                await server.until_ready()
            await asyncio.sleep(rng.uniform(0.02, 0.6))
            server.signal(signal.SIGKILL)
            assert await server.exit_code(5) == -signal.SIGKILL
    async with server_process(model, *flags, port=port) as server:
        await server.until_ready()
        answered, refused = await finish(server, batch_id)
        ids = [f"r{i}" for i in range(NUM_LINES)]
        assert answered == [each for i, each in enumerate(ids) if i % 10 != 3]
        assert refused == [each for i, each in enumerate(ids) if i % 10 == 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_terminated_server_lets_lines_go_and_the_next_one_goes_on(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    flags = (*FLAGS, "--max-num-seqs", "8", "--state-dir", str(tmp_path / "state"))
    slowly = [{"point": "forward_sleep", "count": -1, "seconds": 0.02}]
    async with server_process(model, *flags, faults=slowly) as server:
        await server.until_ready()
        async with client_of(server.url) as client:
            file = await client.files.create(file=("in", job()), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
            )
            async with asyncio.timeout(WAIT_S):
                while not (batch.request_counts and batch.request_counts.completed):
                    await asyncio.sleep(0.02)
                    batch = await client.batches.retrieve(batch.id)
        server.signal(signal.SIGTERM)
        assert await server.exit_code(EXIT_S) == 0  # it waits for no line
    store = BatchStore(tmp_path / "state")
    found = store.find_batch(batch.id, "")
    store.close()
    assert found is not None
    assert 0 < found.completed + found.failed < NUM_LINES
    async with server_process(model, *flags) as server:
        await server.until_ready()
        answered, refused = await finish(server, batch.id)
    assert len({*answered, *refused}) == len(answered) + len(refused) == NUM_LINES
