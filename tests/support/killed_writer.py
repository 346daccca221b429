"""A process that answers prompts with a prefix cache on disk until it is killed."""

from __future__ import annotations

import asyncio
import random
from multiprocessing.connection import Connection
from pathlib import Path

from engine import GenerationRequest, SamplingParams
from tests.support.disk_engines import disk_engine
from tests.support.engines import EngineShape, collect

NUM_PROMPTS = 40
NUM_OUTPUT = 8
SHAPE = EngineShape(prefix_caching=True, num_blocks=60, max_model_len=200)  # far less than all prompts need


def prompt_of(number: int) -> list[int]:
    """One of NUM_PROMPTS; some begin alike."""
    shared = random.Random(number // 4)
    own = random.Random(100 + number)
    return [shared.randrange(3, 90) for _ in range(40)] + [own.randrange(3, 90) for _ in range(20 + number)]


def answer_until_killed(directory: Path, seed: int, answers: Connection) -> None:
    """Send (prompt's number, token ids, blocks read from disk by then) of one after another."""
    asyncio.run(_answer(directory, random.Random(seed), answers))


async def _answer(directory: Path, draw: random.Random, answers: Connection) -> None:
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    async with disk_engine(directory, SHAPE) as harness:
        engine = harness.engine
        while True:
            number = draw.randrange(NUM_PROMPTS)
            request = GenerationRequest(f"{number}-{draw.random()}", prompt_of(number), sampling)
            found = await collect(engine.submit(request))
            answers.send((number, found.token_ids, engine.metrics.prefix_cache_disk_read_blocks))
