"""A real model behind real HTTP with a KV cache that holds one request and a half."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from config import load_settings
from engine import build_engine
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.native import WITHOUT_KERNELS
from tests.support.speculated import single_threaded
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

NUM_BLOCKS, BLOCK_SIZE = 10, 16
NEEDED_TOKENS = NUM_BLOCKS * BLOCK_SIZE * 6 // 10
PROMPT_TOKENS = 30
BLOCK_BYTES = 8192  # of the tiny model in float32; checked below
HOST_BLOCKS = 7  # room for one of them: the others must be computed again


@pytest.mark.parametrize("num_requests", [6, pytest.param(16, marks=pytest.mark.slow)])
async def test_requests_of_most_of_the_cache_each_complete_with_their_serial_text(
    num_requests: int, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path / "llama")
    flags = {
        "--dtype": "float32",
        "--max-model-len": str(NUM_BLOCKS * BLOCK_SIZE),
        "--num-kv-blocks": str(NUM_BLOCKS),
        "--preemption": "swap",
        "--swap-space": str(HOST_BLOCKS * BLOCK_BYTES),
    }
    settings = load_settings(
        [str(directory), *(word for flag in flags.items() for word in flag)], WITHOUT_KERNELS
    )
    draw = random.Random(5)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": [draw.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
            "max_tokens": NEEDED_TOKENS - PROMPT_TOKENS,
            "temperature": 0.8,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(num_requests)
    ]

    engine = build_engine(settings)
    with single_threaded():  # a model this small only waits for its threads
        await engine.start()
    try:
        assert engine.info.kv_bytes == NUM_BLOCKS * BLOCK_BYTES
        async with server_url(engine) as url:

            async def token_ids(body: dict[str, Any]) -> list[int]:
                reply = await ask(url, "POST", "/v1/completions", body)
                assert reply.status == 200, reply.body
                ids: list[int] = reply.json()["choices"][0]["token_ids"]
                return ids

            serial = [await token_ids(body) for body in bodies]
            assert not engine.metrics.preemptions.total()
            together = await asyncio.gather(*(token_ids(body) for body in bodies))
            page = (await ask(url, "GET", "/metrics")).body.decode()
        assert list(together) == serial
        assert engine.gauges().kv_blocks_used == 0
    finally:
        await engine.stop()
    for mode in ("swap", "recompute"):
        assert f'slipstream_preemptions_total{{mode="{mode}",model_name="test-model"}} 0.0' not in page
        assert engine.metrics.preemptions[mode] > 0, mode
