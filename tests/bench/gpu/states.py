"""A model that carries state, whole engine: by kernels and recordings, and as torch does it; and a prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import uvloop

from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.slot_states import state_bytes
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.startup.build import put_together
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_rates import copy_rate, seconds_of
from tests.bench.gpu.engines import SETTLE_STEPS, decode_step, made_engine, settings_for
from tests.bench.gpu.made_models import BLOCK_SIZE, token_bytes, weight_bytes
from tests.bench.report import Bar, Section

# Percent of a copy's rate, and how many times as fast as steps of torch's operations, queued one by one, a
# step of one sequence is. Expectations, which no device has confirmed yet.
COPY_BAR, PLAIN_BAR = 50.0, 2.0
_SERVED, _PLAIN = "as served", "by torch"


def run_states(bench: Bench) -> Section:
    """A dense Qwen3.5 by batches."""
    sizes, shape = bench.sizes, bench.sizes.hybrid
    section = Section("states", f"{shape.name}, whole engine, context {sizes.decode_context}, {sizes.dtype}")
    section.notes.append(
        "of a copy: bytes of weights, K/V and states, these twice, over a step's time and a copy's rate."
    )
    peak = copy_rate(sizes, bench.device, section)
    bench.keep(section)
    loaded = bench.model(shape, sizes.decode_context + 4 * SETTLE_STEPS + 2 * sizes.steps)
    uvloop.run(_measure(bench, section, loaded, peak))
    return section


async def _measure(bench: Bench, section: Section, loaded: LoadedModel, peak: float) -> None:
    """Both ways; `peak` is in bytes a second. Torch's way only for one sequence."""
    sizes, shape = bench.sizes, bench.sizes.hybrid
    served = await _step_seconds(bench, section, loaded, sizes.decode_batches, _SERVED)
    for batch, seconds in served.items():
        num_bytes = weight_bytes(loaded) + batch * sizes.decode_context * token_bytes(loaded)
        num_bytes += 2 * batch * state_bytes(loaded.states, loaded.dtype)
        share = section.add(f"batch {batch}", "of a copy", "%", [100 * num_bytes / seconds / peak])
        section.bars.append(
            Bar(f"{shape.name} of a copy, batch {batch}", COPY_BAR, "%", share.median, at_least=True)
        )
    one = sizes.decode_batches[:1]
    plain = await _step_seconds(bench, section, replace(loaded, state_kernel=None), one, _PLAIN)
    ratio = plain[one[0]] / served[one[0]]
    section.bars.append(Bar(f"{shape.name}, over torch's own", PLAIN_BAR, "x", ratio, at_least=True))
    _read_prompts(bench, section, loaded)


@torch.inference_mode()
def _read_prompts(bench: Bench, section: Section, loaded: LoadedModel) -> None:
    """One prompt in one pass, as served and, where kernels take in chunks, with them left out."""
    sizes, shape = bench.sizes, bench.sizes.hybrid
    tokens, scans = sizes.decode_context, cast(Any, type(loaded.state_kernel))
    ways = {_SERVED: loaded}
    if hasattr(loaded.state_kernel, "in_chunks"):
        ways["token by token"] = replace(loaded, state_kernel=scans(in_chunks=()))
    inputs = pack_step([Part([5] * tokens, 0, tokens, range(-(-tokens // BLOCK_SIZE)))], BLOCK_SIZE)
    inputs = replace(inputs, state_slots=np.zeros(1, np.int32))
    for name, way in ways.items():
        bench.say(f"reading {tokens} tokens, {name}")
        runner = put_together(settings_for(1, loaded.max_model_len), way, bench.tokenizer(shape)).runner
        seconds = seconds_of(partial(runner.run, inputs), bench.device, sizes.repeats)
        section.add(f"{tokens} tokens of a prompt", name, "ms", [1e3 * one for one in seconds])
        bench.keep(section)


async def _step_seconds(
    bench: Bench, section: Section, loaded: LoadedModel, batches: tuple[int, ...], name: str
) -> dict[int, float]:
    """Of a step, by batch."""
    sizes = bench.sizes
    seconds = {}
    settings = settings_for(max(batches), loaded.max_model_len)
    async with made_engine(settings, loaded, bench.tokenizer(sizes.hybrid), skip_prompts=False) as made:
        for batch in batches:
            bench.say(f"{batch} sequences, {name}")
            await decode_step(made, batch, sizes.decode_context, SETTLE_STEPS)
            step = await decode_step(made, batch, sizes.decode_context, sizes.steps)
            section.add(f"batch {batch}", f"a step, {name}", "ms", [1e3 * step.seconds])
            section.add(f"batch {batch}", f"on the device, {name}", "ms", [1e3 * step.device_s])
            seconds[batch] = step.seconds
            bench.keep(section)
    return seconds
