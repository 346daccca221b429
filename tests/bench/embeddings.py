"""Vectors a second, by the service and by sentence-transformers: the same model, texts and threads, by turns.

Needs an embedding model for `--model`, and sentence-transformers where Python finds it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from engine import EmbeddingRequest, EmbeddingService, Engine, TextReading, build_engine
from engine.compute.embedding.source import is_embedding_model
from tests.bench.context import BenchContext
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed

RATIO_BAR, COSINE_BAR = 1.5, 0.9999
NUM_TEXTS = 192
CASES: dict[str, tuple[int, ...]] = {
    "12 words": (12,),
    "60 words": (60,),
    "160 words": (160,),
    "5 to 160 words": (5, 12, 30, 60, 160),
}
_WORDS = (
    *("the", "river", "of", "a", "long", "valley", "carries", "stones", "and", "water", "through", "towns"),
    *("where", "people", "build", "bridges", "mills", "gardens", "near", "old", "trees", "while", "birds"),
    *("follow", "boats", "that", "bring", "letters", "grain", "cloth", "news", "schools", "many", "small"),
)


def texts_of(lengths: Sequence[int], seed: int) -> list[str]:
    """Texts of these numbers of words, in any order, other ones for each seed."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(_WORDS, k=drawn.choice(lengths))) for _ in range(NUM_TEXTS)]


async def embed(engine: Engine, texts: Sequence[str]) -> np.ndarray:
    """What a request for these texts gets, HTTP and JSON aside."""
    service = engine.companion
    assert isinstance(service, EmbeddingService)
    reading = TextReading("input", None, service.info.max_model_len)
    with service.admit(None):
        encoded = await service.encode([(text,) for text in texts], reading)
        return await service.compute(EmbeddingRequest(encoded, None, engine.now()))


async def _measure(context: BenchContext, peer: Any) -> list[Section]:
    model = context.settings.model.model
    engine = build_engine(context.settings)
    await engine.start()
    section = Section("embeddings", f"{model}, float32, {torch.get_num_threads()} threads, {NUM_TEXTS} texts")
    try:
        for case, lengths in CASES.items():
            await _measure_case(context, section, engine, peer, (case, lengths))
    finally:
        await engine.drain(0)
        await engine.stop()
    return [section]


async def _measure_case(
    context: BenchContext, section: Section, engine: Engine, peer: Any, case: tuple[str, tuple[int, ...]]
) -> None:
    name, lengths = case
    rates: dict[str, list[float]] = {"sentence-transformers": [], "slipstream": []}
    least = 1.0
    for run in range(-1, context.runs):  # the first warms up
        context.say(f"embeddings, {name}, run {run + 1}/{context.runs}")
        texts = texts_of(lengths, run)
        began = perf_counter()
        expected = peer.encode(texts, show_progress_bar=False)
        between = perf_counter()
        found = await embed(engine, texts)
        ended = perf_counter()
        lengths_of_both = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        least = min(least, float(((found * expected).sum(axis=1) / lengths_of_both).min()))
        if run >= 0:
            rates["sentence-transformers"].append(NUM_TEXTS / (between - began))
            rates["slipstream"].append(NUM_TEXTS / (ended - between))
    theirs = section.add(name, "sentence-transformers", "texts/s", rates["sentence-transformers"]).median
    ours = section.add(name, "slipstream", "texts/s", rates["slipstream"]).median
    section.add(name, "least cosine", "", [least])
    assert theirs is not None and ours is not None
    section.bars.append(
        Bar(f"{name}: over sentence-transformers", RATIO_BAR, "x", ours / theirs, at_least=True)
    )
    section.bars.append(Bar(f"{name}: least cosine", COSINE_BAR, "", least, at_least=True))


def run_embeddings(context: BenchContext) -> list[Section]:
    """The section `embeddings` with its bars."""
    model = context.settings.model
    if not is_embedding_model(model):
        raise BenchmarkFailed("embeddings needs an embedding model: --model DIR, stored in float32")
    try:
        load: Callable[..., Any] = __import__("sentence_transformers").SentenceTransformer
    except ImportError as error:
        raise BenchmarkFailed(f"embeddings needs sentence-transformers: {error}") from error
    return asyncio.run(_measure(context, load(model.model, device="cpu")))
