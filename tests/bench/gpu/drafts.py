"""A draft model that is right four times of five: what it brings, by batch and by schedule."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from engine.build_speculation import MODEL_TOKENS
from engine.model.loader import LoadedModel
from engine.speculation.drafters.draft_loader import on_device
from engine.speculation.drafters.draft_model import DraftModelDrafter, DraftSizes
from engine.speculation.speculative_decoder import DraftSource
from engine.text.tokenizer import Tokenizer
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import BLOCK_SIZE, burst, made_engine, random_prompts, settings_for
from tests.bench.gpu.made_models import make_model, make_walk, random_walk, strayed
from tests.bench.report import Bar, Section
from tests.bench.streams import BurstFigures

AGREEMENT = 0.8
SYNC_BAR, ASYNC_BAR, NEVER_BAR = 1.5, 1.0, 0.97
RUNS = 2
_PROMPT_TOKENS = 32
_ARMS = ("off", "sync", "async", "auto")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A target whose next tokens are known, a draft model that agrees so often, and a tokenizer for both."""

    target: LoadedModel
    draft: LoadedModel
    tokenizer: Tokenizer


def run_drafts(bench: Bench) -> Section:
    """All schedules over all batches, and the bars."""
    sizes = bench.sizes
    section = Section(
        "drafts",
        f"{sizes.small.name} drafts for {sizes.large.name}, agreeing {AGREEMENT:.0%} of the time, "
        f"up to {MODEL_TOKENS} tokens",
    )
    section.notes.append(
        "From the first request to the last token; the runs after a first, in which schedules are found out."
    )
    pair = _make_pair(bench)
    rates: dict[tuple[str, int], float] = {}
    for arm in _ARMS:
        rates |= uvloop.run(_measure(bench, section, pair, arm))
    _judge(section, sizes.draft_batches, rates)
    return section


def _judge(section: Section, batches: Sequence[int], rates: dict[tuple[str, int], float]) -> None:
    """The bars, and each schedule over none."""
    for batch in batches:
        for arm in _ARMS[1:]:
            gain = rates[arm, batch] / rates["off", batch]
            section.add(f"batch {batch}", f"{arm} / off", "x", [gain])
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
        models.append(loaded)
    return _Pair(models[0], models[1], bench.tokenizer(sizes.large))


def _max_tokens(bench: Bench) -> int:
    return _PROMPT_TOKENS + bench.sizes.draft_tokens


async def _measure(bench: Bench, section: Section, pair: _Pair, arm: str) -> dict[tuple[str, int], float]:
    """One schedule over all batches: output tokens a second, by schedule and batch."""
    sizes = bench.sizes
    most, max_tokens = max(sizes.draft_batches), _max_tokens(bench)
    flags = () if arm == "off" else ("--speculative-method", "auto", "--speculation-schedule", arm)
    settings = settings_for(most, max_tokens + MODEL_TOKENS, *flags)
    sources: tuple[DraftSource, ...] = ()
    if arm != "off":
        blocks = settings.cache.num_kv_blocks or 0
        draft_sizes = DraftSizes(pair.target.vocab_size, blocks, BLOCK_SIZE, max_num_seqs=most)
        drafter = DraftModelDrafter(pair.draft, draft_sizes, on_device=on_device(pair.draft, draft_sizes))
        sources = (DraftSource(drafter, MODEL_TOKENS),)
    rates: dict[tuple[str, int], float] = {}
    async with made_engine(settings, pair.target, pair.tokenizer, sources) as made:
        for batch in sizes.draft_batches:
            bench.say(f"drafts {arm}, batch {batch}")
            runs = []
            stats = made.engine.metrics.speculation
            proposed, accepted = stats.num_proposed, stats.num_accepted
            for run in range(RUNS + 1):  # the first is for the schedule, and the lengths, to be found out
                prompts = random_prompts(pair.target.vocab_size, batch, _PROMPT_TOKENS, 100 * batch + run)
                runs.append(BurstFigures.of(await burst(made.engine, prompts, sizes.draft_tokens)))
            kept = [figures.output_tokens_per_s for figures in runs[1:]]
            section.add(f"batch {batch}", arm, "tokens/s", kept)
            rates[arm, batch] = statistics.median(kept)
            if arm == "sync" and stats.num_proposed > proposed:
                share = (stats.num_accepted - accepted) / (stats.num_proposed - proposed)
                section.add(f"batch {batch}", "accepted", "%", [100 * share])
            bench.keep(section)
    return rates
