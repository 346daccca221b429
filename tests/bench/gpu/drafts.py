"""A draft model that is right four times of five: what it brings, by batch and by schedule."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import uvloop

from engine.compute.drafters.draft_loader import on_device
from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes
from engine.compute.loading.loader import LoadedModel
from engine.plan.speculation.speculative_decoder import DraftSource
from engine.startup.build_speculation import MODEL_TOKENS
from engine.text.tokenizer import Tokenizer
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import MadeEngine, burst, made_engine, random_prompts, settings_for
from tests.bench.gpu.made_models import BLOCK_SIZE, fused, make_model, make_walk, random_walk, strayed
from tests.bench.report import Bar, Section
from tests.bench.streams import BurstFigures

AGREEMENT = 0.8
SYNC_BAR, ASYNC_BAR, NEVER_BAR = 1.5, 1.0, 0.97
RUNS = 2
_PROMPT_TOKENS = 32
_ARMS = ("off", "sync", "async", "auto")

Rates: TypeAlias = dict[tuple[str, int], float]  # tokens a second by schedule and batch


@dataclass(frozen=True, slots=True)
class _Pair:
    """A target whose next tokens are known, a draft model that agrees so often, and a tokenizer for both."""

    target: LoadedModel
    draft: LoadedModel
    tokenizer: Tokenizer


class _Found(NamedTuple):
    """Tokens a second of each schedule's runs, and how much of the drafts was right, if there were any."""

    rates: dict[str, list[float]]
    accepted_percent: list[float]


def run_drafts(bench: Bench) -> Section:
    """All schedules over all batches, and the bars."""
    sizes = bench.sizes
    section = Section(
        "drafts",
        f"{sizes.small.name} drafts for {sizes.large.name}, agreeing {AGREEMENT:.0%} of the time, "
        f"up to {MODEL_TOKENS} tokens",
    )
    section.notes.append(
        "From the first request to the last token, schedules in turns; the runs after a first one, in which "
        "they find out what pays. accepted: of the drafts of sync."
    )
    rates = uvloop.run(_measure(bench, section, _make_pair(bench)))
    _judge(section, sizes.draft_batches, rates)
    return section


def _judge(section: Section, batches: Sequence[int], rates: Rates) -> None:
    """The bars."""
    alone = min(batches)
    over_off = rates["sync", alone] / rates["off", alone]
    section.bars.append(Bar(f"sync / off, batch {alone}", SYNC_BAR, "x", over_off, at_least=True))
    over_sync = rates["async", alone] / rates["sync", alone]
    section.bars.append(Bar(f"async / sync, batch {alone}", ASYNC_BAR, "x", over_sync, at_least=True))
    worst = min(rates["auto", batch] / rates["off", batch] for batch in batches)
    section.bars.append(Bar("auto / off, every batch", NEVER_BAR, "x", worst, at_least=True))


def _make_pair(bench: Bench) -> _Pair:
    sizes = bench.sizes
    assert sizes.large.vocab == sizes.small.vocab, "a draft model must have the target's vocabulary"
    successors = random_walk(sizes.large.vocab)
    models = []
    for shape, walk in ((sizes.large, successors), (sizes.small, strayed(successors, AGREEMENT))):
        bench.say(f"making the {shape.name}")
        loaded = make_model(shape.config(tied=False), sizes.dtype, bench.device, _max_tokens(bench))
        make_walk(loaded, walk)
        models.append(fused(loaded))
    return _Pair(models[0], models[1], bench.tokenizer(sizes.large))


def _max_tokens(bench: Bench) -> int:
    return _PROMPT_TOKENS + bench.sizes.draft_tokens + MODEL_TOKENS


async def _measure(bench: Bench, section: Section, pair: _Pair) -> Rates:
    """Output tokens a second of every schedule, by schedule and batch."""
    rates: Rates = {}
    async with AsyncExitStack() as stack:
        engines = {}
        for arm in _ARMS:
            bench.say(f"an engine for {arm}")
            engines[arm] = await stack.enter_async_context(_engine(bench, pair, arm))
        for batch in bench.sizes.draft_batches:
            found = await _in_turns(bench, engines, batch)
            name = f"batch {batch}"
            for arm, runs in found.rates.items():
                section.add(name, arm, "tokens/s", runs)
                rates[arm, batch] = statistics.median(runs)
            for arm in _ARMS[1:]:
                section.add(name, f"{arm} / off", "x", [rates[arm, batch] / rates["off", batch]])
            if found.accepted_percent:
                section.add(name, "accepted", "%", found.accepted_percent)
            bench.keep(section)
    return rates


def _engine(bench: Bench, pair: _Pair, arm: str) -> AbstractAsyncContextManager[MadeEngine]:
    """The engine that drafts by this schedule."""
    most, max_tokens = max(bench.sizes.draft_batches), _max_tokens(bench)
    flags = () if arm == "off" else ("--speculative-method", "auto", "--speculation-schedule", arm)
    settings = settings_for(most, max_tokens, *flags)
    sources: tuple[DraftSource, ...] = ()
    if arm != "off":
        blocks = settings.cache.num_kv_blocks or 0
        draft_sizes = DraftSizes(pair.target.vocab_size, blocks, BLOCK_SIZE, max_num_seqs=most)
        drafter = DraftModelDrafter(pair.draft, draft_sizes, on_device=on_device(pair.draft, draft_sizes))
        sources = (DraftSource(drafter, MODEL_TOKENS),)
    return made_engine(settings, pair.target, pair.tokenizer, sources)


async def _in_turns(bench: Bench, engines: dict[str, MadeEngine], batch: int) -> _Found:
    """Runs of one batch, of each engine after the others; the first does not count."""
    bench.say(f"batch {batch}")
    rates: dict[str, list[float]] = {arm: [] for arm in engines}
    stats = engines["sync"].engine.metrics.speculation
    proposed, accepted = stats.num_proposed, stats.num_accepted
    for run in range(RUNS + 1):
        for arm, made in engines.items():
            vocab_size = made.parts.info.vocab_size
            prompts = random_prompts(vocab_size, batch, _PROMPT_TOKENS, 100 * batch + run)
            figures = BurstFigures.of(await burst(made.engine, prompts, bench.sizes.draft_tokens))
            if run:
                rates[arm].append(figures.output_tokens_per_s)
    num_proposed, num_accepted = stats.num_proposed - proposed, stats.num_accepted - accepted
    return _Found(rates, [100 * num_accepted / num_proposed] if num_proposed else [])
