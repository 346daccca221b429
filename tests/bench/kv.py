"""What K/V of 8 bits costs in accuracy and saves in time: `--kv-cache-dtype int8` beside the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from config import CacheSettings
from engine.compute.attention import CpuAttention, LayerCall
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.native.install import with_kernels
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.kept_kv import with_kept_kv
from engine.startup.build import use_compute_threads
from tests.bench.context import BenchContext
from tests.bench.quantization import BLOCK_SIZE, Model, measure_accuracy, read_windows
from tests.bench.report import Bar, Section

CONTEXT_TOKENS = 8192
STEPS = 8  # of one timing
WARM_UP_STEPS = 4
TIME_BAR, PERPLEXITY_BAR = 1.3, 1.005
INT8 = "int8"


def run_kv(context: BenchContext) -> list[Section]:
    """Accuracy, and attention's time with a long context; both with bars."""
    use_compute_threads()
    settings = context.settings.model.model_copy(update={"compile": "on"})
    directory = context.model_directory

    def load() -> LoadedModel:
        return with_kept_kv(load_model(directory, settings), CacheSettings(kv_cache_dtype=INT8))

    context.say("loading the model")
    kept = with_kernels(load(), settings, context.settings.home, load)
    plain = replace(kept, kept_kv=None)
    name = str(plain.dtype).removeprefix("torch.")
    context.say("reading texts")
    accuracy = measure_accuracy([Model(name, plain), Model(INT8, kept)], read_windows(directory))
    accuracy.name, accuracy.notes = "kv: accuracy", ["Weights are the same in both."]
    perplexity = {row.case: row.median for row in accuracy.measurements if row.quantity == "perplexity"}
    found = (perplexity[INT8] or 0) / (perplexity[name] or 1)
    accuracy.bars.append(Bar("perplexity, K/V in int8", PERPLEXITY_BAR, "x", found, at_least=False))
    context.say("attending")
    return [accuracy, measure_time({name: plain, INT8: kept}, context.runs)]


def measure_time(models: dict[str, LoadedModel], runs: int) -> Section:
    """All layers' attention of one decoding stream, over either K/V in turns."""
    section = Section("kv: attention", f"one stream with {CONTEXT_TOKENS:,} tokens of context, all layers")
    timed = {name: attention_of(loaded) for name, loaded in models.items()}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(runs):
        for name, attend in timed.items():
            for _ in range(WARM_UP_STEPS):
                attend()
            started = perf_counter()
            for _ in range(STEPS):
                attend()
            times[name].append((perf_counter() - started) / STEPS)
    for name, seconds in times.items():
        section.add("one step", name, "ms", [1e3 * each for each in seconds])
    ratio = section.add("one step", "ratio", "x", [a / b for a, b in zip(*times.values(), strict=True)])
    section.bars.append(Bar("attention over K/V in int8", TIME_BAR, "x", ratio.median, at_least=True))
    return section


def attention_of(loaded: LoadedModel) -> Callable[[], None]:
    """A step of attention over blocks of noise that lie anywhere, as after hours of serving."""
    num_blocks = CONTEXT_TOKENS // BLOCK_SIZE
    kv = KvTensors(loaded.layers, num_blocks, BLOCK_SIZE, loaded.dtype, loaded.device, loaded.kv_dtype)
    slots = torch.arange(CONTEXT_TOKENS)
    for number, layer in enumerate(loaded.layers):
        key, value = (
            torch.randn(CONTEXT_TOKENS, layer.num_kv_heads, dim).to(loaded.dtype)
            for dim in (layer.key_dim, layer.value_dim)
        )
        kv.write(number, kv.rows_of(slots, layer.num_kv_heads), key, value)
    blocks = np.random.default_rng(0).permutation(num_blocks).tolist()
    part = Part([0] * CONTEXT_TOKENS, CONTEXT_TOKENS - 1, CONTEXT_TOKENS, blocks)
    step = CpuAttention(loaded.kernels).plan(pack_step([part], BLOCK_SIZE), kv)
    heads, scaling = loaded.config.num_attention_heads, loaded.layers[0].key_dim ** -0.5
    query = torch.randn(1, heads, loaded.layers[0].key_dim).to(loaded.dtype)

    def attend() -> None:
        for number, layer in enumerate(loaded.layers):
            step.attend(query, LayerCall(number, scaling, layer.window))

    return attend
