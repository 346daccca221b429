"""Medusa heads in the engine: what a call of the drafter costs, and tokens a second with and without them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
import uvloop

from config import load_settings
from engine.compute.drafters.medusa import MedusaDrafter, load_medusa
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_source import resolve_model
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest, TargetFeatures
from tests.bench.context import BenchContext
from tests.bench.decode import LoadedEngine, loaded_engine, token_times
from tests.bench.report import Section

BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.7)
NODES = (4, 8)  # drafts in every step of the arms that leave nothing to the controller
MAX_TOKENS = 128
# Several engines stand side by side.
SIZES = ("--max-model-len", "1024", "--kv-cache-memory", "256MiB", "--swap-space", "0")
CALLS = 20
Say = Callable[[str], None]

# Questions that the heads were not trained on.
QUESTIONS = (
    "How does a lighthouse work, and who looks after it today?",
    "Write a short letter of complaint about a late parcel.",
    "Explain what a prime number is and give some examples.",
    "Give me a recipe for tomato soup with numbered steps.",
    "Write a Python class for a bank account.",
    "What should I pack for a week of hiking in the mountains?",
    "Tell me a story about a fox who learns to share.",
    "Why do leaves change their colour in autumn?",
)


def measure_all(heads: Path, runs: int, threads: int | None, say: Say) -> list[Section]:
    """Every section, measured in turns within each."""
    if threads is not None:
        torch.set_num_threads(threads)
    return [drafter_section(heads, runs, say), uvloop.run(engine_section(heads, runs, threads, say))]


def drafter_section(heads: Path, runs: int, say: Say) -> Section:
    """One call of the drafter, alone on the machine."""
    say("the drafter by itself")
    settings = load_settings([])
    target = load_model(resolve_model(settings.model, settings.home), settings.model)
    drafter = load_medusa(heads, target)
    section = Section("medusa drafter", f"one call, trees of {drafter.num_nodes} drafts")
    for batch in (1, 8, 32):
        for temperature in TEMPERATURES:
            jobs = [make_job(row, temperature, target) for row in range(batch)]
            call_s(drafter, jobs)
            times = [1000 * call_s(drafter, jobs) for _ in range(runs)]
            section.add(f"batch {batch}", f"T {temperature:g}", "ms", times)
    return section


def make_job(row: int, temperature: float, target: LoadedModel) -> DraftJob:
    """A job at position 100 with a made-up hidden state."""
    generator = torch.Generator().manual_seed(row)
    hidden = torch.randn(1, target.config.hidden_size, generator=generator).to(target.dtype)
    sampling = SamplingParams(max_tokens=999, temperature=temperature, seed=row)
    return DraftJob(
        DraftRequest(f"r{row}", 50, sampling), 0, 0, (1,) * 101, 101, 32, (TargetFeatures(100, hidden),)
    )


def call_s(drafter: MedusaDrafter, jobs: Sequence[DraftJob]) -> float:
    """Mean seconds of a call."""
    started = perf_counter()
    for _ in range(CALLS):
        drafter.draft(jobs)
    return (perf_counter() - started) / CALLS


def make_arms(heads: Path) -> dict[str, list[str]]:
    """The flags of each side of the comparison."""
    medusa = ["--speculative-method", "medusa", "--medusa-heads", str(heads)]
    always = [
        "--draft-length-policy",
        "fixed",
        "--min-acceptance-rate",
        "0",
        "--speculation-schedule",
        "sync",
    ]
    arms = {"off": ["--speculative-method", "none"], "default": medusa}
    for nodes in NODES:
        arms[f"always {nodes}"] = [*medusa, *always, "--num-speculative-tokens", str(nodes)]
    return arms


async def engine_section(heads: Path, runs: int, threads: int | None, say: Say) -> Section:
    """Whole answers: without drafts, by default, and with a tree in every step; run by run in turns."""
    section = Section("medusa speed", f"answers of up to {MAX_TOKENS} tokens, off and with heads, in turns")
    async with AsyncExitStack() as stack:
        engines = {}
        for name, flags in make_arms(heads).items():
            context = BenchContext(load_settings([*flags, *SIZES]), (*flags, *SIZES), runs, say)
            engines[name] = await stack.enter_async_context(loaded_engine(context))
            if threads is not None:
                target = engines[name].executors.target
                await asyncio.get_running_loop().run_in_executor(target, torch.set_num_threads, threads)
        for batch, temperature in product(BATCHES, TEMPERATURES):
            say(f"batch {batch}, temperature {temperature:g}")
            await measure_case(section, engines, batch, temperature, runs)
    section.notes.append("a round: what a step that verified drafts committed; other steps commit one token.")
    return section


async def measure_case(
    section: Section, engines: Mapping[str, LoadedEngine], batch: int, temperature: float, runs: int
) -> None:
    """One batch size at one temperature: all engines, run by run, after one that warms up."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    rounds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(runs + 1):
        for name, loaded in engines.items():
            rate, tokens_per_round = await burst(loaded, batch, temperature, run)
            if run > 0:
                rates[name].append(rate)
                rounds[name].append(tokens_per_round)
    case = f"batch {batch}, T {temperature:g}"
    for name in engines:
        section.add(f"{case}, {name}", "rate", "tokens/s", rates[name])
        if name != "off":
            pairs = zip(rates[name], rates["off"], strict=True)
            section.add(f"{case}, {name}", "rate / off", "x", [mine / off for mine, off in pairs])
            section.add(f"{case}, {name}", "a round", "tokens", rounds[name])


async def burst(loaded: LoadedEngine, batch: int, temperature: float, run: int) -> tuple[float, float]:
    """Tokens a second of `batch` answers at once, and tokens a round of drafts (0 without rounds)."""
    engine = loaded.engine
    decoder = loaded.parts.batcher.decoder
    stats = decoder.stats
    rounds, committed = stats.num_rounds, stats.num_committed
    prompts = [
        await engine.text.render_chat(
            [{"role": "user", "content": QUESTIONS[(run * batch + row) % len(QUESTIONS)]}]
        )
        for row in range(batch)
    ]
    started = perf_counter()
    streams = [
        engine.submit(
            GenerationRequest(
                request_id=f"medusa-{batch}-{temperature}-{run}-{row}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=row),
            )
        )
        for row, prompt in enumerate(prompts)
    ]
    times = await asyncio.gather(*(token_times(stream) for stream in streams))
    rate = sum(map(len, times)) / (perf_counter() - started)
    return rate, (stats.num_committed - committed) / max(1, stats.num_rounds - rounds)
