"""The law of what a whole server says: one prompt over and over, among clients that leave or are preempted.

Whatever the verification, the first tokens together must come as often as the target's own chances say.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine
from engine.plan.step_records import LogitAdjustment
from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask
from tests.support.examples import share_of
from tests.support.repetitive_world import WORDS, repetitive_model, save_repetitive_model
from tests.support.sampling_reference import Float64, Row, chi_square_p, counted, reference_probs
from tests.support.speculated import by_turns, engine_of, single_threaded

PROMPT = [9, 7, 18, 12, 6, 9, 7, 18, 4]
SAID = WORDS[3:9]  # the only words
NUM_TOKENS = 4  # of each reply whose law is looked at: a whole round of drafts and what follows
NUM_DRAFTS = 2
ROW = Row(temperature=1.8, adjustment=LogitAdjustment(0, allowed_token_ids=tuple(SAID), presence_penalty=0.6))
BODY = {
    "prompt": PROMPT,
    "max_tokens": 10,
    "temperature": ROW.temperature,
    "presence_penalty": ROW.adjustment.presence_penalty,
    "allowed_token_ids": list(SAID),
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded(), pytest.MonkeyPatch.context() as patch:
        # The cache is so small that some are preempted, which is not to keep the drafter from its work.
        patch.setattr("engine.compute.drafters.draft_loader.KV_SHARE", 8.0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model that is right more often than not."""
    directory = tmp_path_factory.mktemp("models")
    return (
        save_repetitive_model(directory / "target"),
        save_repetitive_model(directory / "draft", noise=0.1),
    )


@pytest.fixture(scope="module")
def law(small: None) -> Float64:
    """The joint law of the first tokens, the last one counting fastest: [words ** NUM_TOKENS]."""
    model, words = repetitive_model(), np.array(SAID)
    joint = np.ones(1)
    for length in range(NUM_TOKENS):
        outputs = list(product(SAID, repeat=length))
        contexts = torch.tensor([[*PROMPT, *output] for output in outputs])
        with torch.inference_mode():
            logits = model(contexts).logits[:, -1].double().numpy()
        probs = [
            reference_probs(row, said(output))[words] for row, output in zip(logits, outputs, strict=True)
        ]
        joint = (joint[:, None] * np.array(probs)).ravel()
    return joint


def said(output: Sequence[int]) -> Row:
    """How the token after this output is drawn."""
    adjustment = replace(ROW.adjustment, history=counted(PROMPT, output))
    return replace(ROW, adjustment=adjustment)


async def replies(engine: Engine, count: int, seed: int) -> list[list[int]]:
    """The tokens of so many replies, 32 at a time, one client in eight leaving in the middle of another."""
    draw = random.Random(seed)
    places = asyncio.Semaphore(32)
    found: list[list[int]] = []

    async def stay(url: str, body: dict[str, object]) -> None:
        async with places:
            reply = await ask(url, "POST", "/v1/completions", body)
        found.append(reply.json()["choices"][0]["token_ids"])

    async def leave(url: str, body: dict[str, object]) -> None:
        async with places:
            wire = await Wire.connect(url)
            await wire.send("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode())
            await wire.head()
            for _ in range(draw.randrange(12)):
                await wire.chunk()
            await wire.close()

    async with server_url(engine) as url:
        async with asyncio.TaskGroup() as clients:
            for number in range(count):
                clients.create_task(stay(url, {**BODY, "seed": draw.getrandbits(63)}))
                if number % 8 == 0:
                    clients.create_task(leave(url, {**BODY, "seed": number, "max_tokens": 60}))
        async with asyncio.timeout(5):
            while engine.gauges().num_requests_running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    return found


async def law_p(
    verification: str, schedule: str, count: int, models: tuple[Path, Path], law: Float64
) -> float:
    """How likely a sample as far from the law as the server's is."""
    target, draft = map(str, models)
    flags = ["--speculative-method", "draft-model", "--draft-model", draft]
    flags += ["--num-speculative-tokens", str(NUM_DRAFTS), "--draft-verification", verification]
    flags += ["--speculation-schedule", schedule, "--draft-length-policy", "fixed"]
    flags += ["--min-acceptance-rate", "0", "--max-num-seqs", "32", "--num-kv-blocks", "60"]
    executors = by_turns(count) if schedule == "async" else None  # in threads so small a model is never ahead
    async with engine_of(Path(target), *flags, executors=executors) as engine:
        found = await replies(engine, count, seed=1)
        stats, metrics = engine.metrics.speculation, engine.metrics
    print(verification, schedule, stats)
    print(metrics.preemptions, metrics.request_aborts)
    assert metrics.preemptions.total() > 0 < metrics.request_aborts.total()
    assert min(stats.num_accepted, stats.num_proposed - stats.num_accepted) > count / (
        2 if schedule == "sync" else 8
    )
    assert len(found) == count
    cells = [
        np.ravel_multi_index([SAID.index(t) for t in tokens[:NUM_TOKENS]], (len(SAID),) * NUM_TOKENS)
        for tokens in found
    ]
    p = chi_square_p([int(cell) for cell in cells], law)
    print(f"p {p:.4f}")
    return p


# Of matching the other tests of whole engines show more: it gives the very tokens.
@pytest.mark.by_default("rejection", "block")
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
async def test_the_law_of_a_server_is_the_target_s(
    verification: str, models: tuple[Path, Path], law: Float64
) -> None:
    assert await law_p(verification, "sync", share_of(1000), models, law) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
async def test_the_law_of_a_server_is_the_target_s_to_more_places(
    verification: str, schedule: str, models: tuple[Path, Path], law: Float64
) -> None:
    assert await law_p(verification, schedule, 20_000, models, law) > 1e-3
