"""A process that answers prompts with a prefix cache on disk until it is killed."""

from __future__ import annotations

import asyncio
import random
from multiprocessing.connection import Connection
from pathlib import Path

from config import load_settings
from engine import GenerationRequest, SamplingParams, build_engine
from tests.support.engines import collect
from tests.support.native import WITHOUT_KERNELS

NUM_PROMPTS = 40
NUM_OUTPUT = 8
FLAGS = (
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "512KiB",
    "--kv-block-size",
    "4",
    "--max-model-len",
    "128",
)


def prompt_of(number: int) -> list[int]:
    """One of NUM_PROMPTS; some begin alike."""
    draw = random.Random(number // 4)
    shared = [draw.randrange(3, 500) for _ in range(40)]
    draw = random.Random(100 + number)
    return shared + [draw.randrange(3, 500) for _ in range(20 + number)]


def answer_until_killed(model: Path, directory: Path | None, seed: int, answers: Connection) -> None:
    """Send (number, token ids, blocks read by then) of prompt after prompt; of each once without a disk."""
    asyncio.run(_answer(model, directory, seed, answers))


async def _answer(model: Path, directory: Path | None, seed: int, answers: Connection) -> None:
    kept = () if directory is None else ("--prefix-cache-dir", str(directory))
    engine = build_engine(load_settings([str(model), *FLAGS, *kept], environ=WITHOUT_KERNELS))
    await engine.start()
    draw = random.Random(seed)
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    numbers = list(range(NUM_PROMPTS))
    while True:
        draw.shuffle(numbers)
        for number in numbers:
            request = GenerationRequest(f"{number}-{draw.random()}", prompt_of(number), sampling)
            found = await collect(engine.submit(request))
            answers.send((number, found.token_ids, engine.metrics.prefix_cache_disk_read_blocks))
        if directory is None:
            await engine.stop()
            return
