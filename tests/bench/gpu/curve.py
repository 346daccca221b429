"""How tokens a second, the time of a step and the host's share of it go with batch and context."""

from __future__ import annotations

import uvloop

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import MadeEngine, decode_step, made_engine, settings_for
from tests.bench.report import Section

# Room for those who wait, decoding, until all prompts are in.
_MORE_TOKENS = 1024


def run_curve(bench: Bench) -> Section:
    """The smaller model over all batches and contexts; no bars."""
    sizes, shape = bench.sizes, bench.sizes.small
    section = Section("curve", f"{shape.name}, whole engine, greedy, {sizes.dtype}")
    section.notes.append("host: how much of the time the device had no step to work on.")
    max_tokens = max(sizes.curve_contexts) + _MORE_TOKENS

    async def measure() -> None:
        loaded = bench.model(shape, max_tokens)
        settings = settings_for(max(sizes.curve_batches), max_tokens, batched_tokens=1 << 16)
        async with made_engine(settings, loaded, bench.tokenizer(shape), skip_prompts=True) as made:
            await decode_step(made, 1, min(sizes.curve_contexts), sizes.steps)
            for context in sizes.curve_contexts:
                for batch in sizes.curve_batches:
                    bench.say(f"{batch} sequences of {context} tokens")
                    await _measure(bench, section, made, batch, context)

    uvloop.run(measure())
    return section


async def _measure(bench: Bench, section: Section, made: MadeEngine, batch: int, context: int) -> None:
    step = await decode_step(made, batch, context, bench.sizes.steps // 2)
    name = f"context {context}, batch {batch}"
    section.add(name, "engine", "tokens/s", [batch / step.seconds])
    section.add(name, "step", "ms", [1e3 * step.seconds])
    section.add(name, "on the device", "ms", [1e3 * step.device_s])
    section.add(name, "host", "%", [step.host_percent])
    bench.keep(section)
