"""Rounds of an EAGLE layer alone: each sequence and operation by itself, and as a GPU computes them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from config import ModelSettings
from engine.compute.cuda.layer_choice import quick_layer
from engine.compute.cuda.round_choice import fastest_steps
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_layer import EagleLayer, EagleShape, fresh_config
from engine.compute.drafters.eagle_loader import EagleRoom, make_kv
from engine.compute.drafters.eagle_round import GUESSES, EagleRound
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import ChainSteps, EagerSteps, LayerChains
from engine.compute.drafters.slab_rows import RowsApart
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.made_models import BLOCK_SIZE, make_model
from tests.bench.report import Bar, Section

# How many times as fast a round of as many sequences is. Expectations, which no device has confirmed yet.
BARS = {1: 1.5, 64: 5.0}
_NEW_ROWS, _DRAFTS = 3, 5  # of each sequence in a round
_CONTEXT = 128  # positions that are kept of it
_PLAIN, _SERVED = "by torch", "as served"


@torch.inference_mode()
def run_rounds(bench: Bench) -> Section:
    """Rounds that read three rows of each sequence and draw five drafts, of the layer of an 8B model."""
    sizes, shape = bench.sizes, bench.sizes.large
    section = Section("rounds", f"rounds of an EAGLE layer of the {shape.name}, {sizes.dtype}")
    section.notes.append("by the host's clock, which waits for each depth.")
    bench.say("making the layer")
    # The layer reads three layers of a target, of which only embedding and head are needed here.
    config = replace(shape, layers=1).config()
    target = make_model(config, sizes.dtype, bench.device, 4 * _CONTEXT)
    token_ids = torch.arange(target.vocab_size, device=bench.device)
    layer = EagleLayer(target, fresh_config(target), EagleShape.for_target(1), token_ids)
    layer.round_to(sizes.dtype)
    weights = EagleWeights.of(layer.to(bench.device).eval())
    make_quick = quick_layer(weights, target, ModelSettings(), BLOCK_SIZE)
    for batch in sizes.draft_batches:
        kv = make_kv(weights.sizes.kv, weights.sizes.window, weights.head, EagleRoom(batch, 1 << 34))
        plain = EagerSteps(TorchEagle(weights), partial(RowsApart, kv), GUESSES)
        width = 3 * shape.hidden
        seconds = {}
        for name, steps in ((_PLAIN, plain), (_SERVED, fastest_steps(plain, kv, width, make_quick))):
            bench.say(f"batch {batch}, {name}")
            runs = _seconds(bench, steps, kv, batch, width)
            seconds[name] = section.add(f"batch {batch}", name, "ms", [1e3 * one for one in runs]).median
        if (limit := BARS.get(batch)) is not None:
            before, after = seconds[_PLAIN], seconds[_SERVED]
            ratio = None if before is None or after is None else before / after
            section.bars.append(Bar(f"over torch's own, batch {batch}", limit, "x", ratio, at_least=True))
        bench.keep(section)
    return section


def _seconds(bench: Bench, steps: ChainSteps, kv: EagleKv, batch: int, width: int) -> list[float]:
    """What a round takes, several times; chains never end early."""
    chains = LayerChains(steps, 0.0)
    num_rows = batch * _NEW_ROWS
    work = EagleRound(
        features=torch.randn((num_rows, width), dtype=kv.keys.dtype, device=kv.keys.device),
        token_ids=list(range(num_rows)),
        positions=[_CONTEXT + row for row in range(_NEW_ROWS)] * batch,
        num_rows=[_NEW_ROWS] * batch,
        num_kept=[_CONTEXT] * batch,
        slabs=list(range(batch)),
        num_drafts=[_DRAFTS] * batch,
        num_wanted=[GUESSES * _DRAFTS] * batch,
    )
    found = chains.run(work)
    assert [len(chain) for chain in found] == [_DRAFTS] * batch, "a chain has ended"
    runs = []
    for _ in range(bench.sizes.repeats):
        began = perf_counter()
        chains.run(work)
        runs.append(perf_counter() - began)
    return runs
