"""A prompt against the rate of a large product."""

from __future__ import annotations

import random

import torch

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.startup.build import put_together
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_rates import product_rate, seconds_of
from tests.bench.gpu.engines import settings_for
from tests.bench.gpu.made_models import BLOCK_SIZE, product_operations
from tests.bench.report import Bar, Section

BAR = 60.0  # percent of the product's rate


@torch.inference_mode()
def run_prefill(bench: Bench) -> Section:
    """One prompt in one pass of the runner, from its token ids to the token drawn."""
    sizes, shape, tokens = bench.sizes, bench.sizes.large, bench.sizes.prefill_tokens
    section = Section("prefill", f"{shape.name}, one prompt of {tokens} tokens, {sizes.dtype}")
    peak = product_rate(sizes, bench.device, section)
    loaded = bench.model(shape, tokens + BLOCK_SIZE)
    settings = settings_for(1, tokens + BLOCK_SIZE)
    runner = put_together(settings, loaded, bench.tokenizer(shape)).runner
    token_ids = random.Random(0).choices(range(2, shape.vocab), k=tokens)
    inputs = pack_step([Part(token_ids, 0, tokens, range(-(-tokens // BLOCK_SIZE)))], BLOCK_SIZE)
    bench.say(f"reading {tokens} tokens with the {shape.name}")
    seconds = seconds_of(lambda: runner.run(inputs), bench.device, sizes.repeats)
    pairs = tokens * (tokens + 1) / 2
    operations = (
        tokens * product_operations(loaded)
        + pairs * shape.attention_operations
        + 2 * shape.hidden * shape.vocab
    )
    name = f"{tokens} tokens"
    section.add(name, "time", "ms", [1e3 * one for one in seconds])
    section.add(name, "rate", "TFLOP/s", [operations / one / 1e12 for one in seconds])
    share = section.add(name, "of a product", "%", [100 * operations / one / peak for one in seconds])
    section.bars.append(Bar(f"prefill of a product, {shape.name}", BAR, "%", share.median, at_least=True))
    section.notes.append("Operations: two for each weight and token, four for each number of a visible key.")
    return section
