"""Decoding against the bytes that must move, at the speed of a plain copy."""

from __future__ import annotations

import uvloop

from engine.compute.loading.loader import LoadedModel
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_rates import copy_rate
from tests.bench.gpu.engines import SETTLE_STEPS, decode_step, made_engine, settings_for
from tests.bench.gpu.made_models import token_bytes, weight_bytes
from tests.bench.gpu.sizes import LlamaShape
from tests.bench.report import Bar, Section

LARGE_BAR, WIDE_BAR, SMALL_BAR = 75.0, 70.0, 60.0  # percent of a copy's rate
_WIDE = 128  # sequences, of which keys and values are as much to read as the weights
RUNS = 3


def run_decode(bench: Bench) -> Section:
    """The whole engine, both models, and the bars of both."""
    sizes = bench.sizes
    section = Section("decode", f"whole engine, context {sizes.decode_context}, greedy, {sizes.dtype}")
    section.notes.append(
        "of a copy: bytes of weights, keys and values that a step must read, over its time and a copy's rate."
    )
    peak = copy_rate(sizes, bench.device, section)
    bench.keep(section)
    for shape, batches in ((sizes.small, sizes.decode_batches[:1]), (sizes.large, sizes.decode_batches)):
        max_tokens = sizes.decode_context + 4 * SETTLE_STEPS + 2 * sizes.steps
        loaded = bench.model(shape, max_tokens)
        bench.say(f"decoding with the {shape.name}")
        uvloop.run(_measure(bench, section, (loaded, shape, batches), peak))
        del loaded
    return section


async def _measure(
    bench: Bench, section: Section, model: tuple[LoadedModel, LlamaShape, tuple[int, ...]], peak: float
) -> None:
    """All batches of one model; `peak` is in bytes a second."""
    loaded, shape, batches = model
    context, steps = bench.sizes.decode_context, bench.sizes.steps
    settings = settings_for(max(batches), loaded.max_model_len)
    async with made_engine(settings, loaded, bench.tokenizer(shape), skip_prompts=True) as made:
        await decode_step(made, max(batches), context, steps)
        for batch in batches:
            found = [await decode_step(made, batch, context, steps) for _ in range(RUNS)]
            name = f"{shape.name}, batch {batch}"
            num_bytes = weight_bytes(loaded) + batch * context * token_bytes(loaded)
            section.add(name, "engine", "tokens/s", [batch / step.seconds for step in found])
            section.add(name, "step", "ms", [1e3 * step.seconds for step in found])
            section.add(name, "on the device", "ms", [1e3 * step.device_s for step in found])
            section.add(name, "moved", "GB/s", [num_bytes / step.seconds / 1e9 for step in found])
            limit = WIDE_BAR if batch >= _WIDE else LARGE_BAR
            limit = limit if shape is bench.sizes.large else SMALL_BAR
            share = section.add(
                name, "of a copy", "%", [100 * num_bytes / step.seconds / peak for step in found]
            )
            section.bars.append(Bar(f"decode of a copy, {name}", limit, "%", share.median, at_least=True))
            bench.keep(section)
