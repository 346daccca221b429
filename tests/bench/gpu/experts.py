"""The experts of a mixture by themselves, fused and as their module computes them, beside a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig

from engine.compute.cuda.graphs.recorder import CudaRecorder
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_rates import copy_rate, seconds_of
from tests.bench.gpu.made_models import make_model
from tests.bench.gpu.sizes import MAX_POSITIONS, MixtureShape
from tests.bench.report import Bar, Section

# Percent of a copy's rate, for one row, of whose time launches are a part, and for more; and how much of the
# module's time it may take. Expectations, which no device has confirmed yet.
COPY_BARS = {1: 40.0}
COPY_BAR = 60.0
OWN_BAR = 1.0
_LAYERS = 4  # one after the other, whose weights no cache holds
_OWN, _FUSED = "the module", "fused"
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, whom each goes through, and their shares


@torch.inference_mode()
def run_experts(bench: Bench) -> Section:
    """Batches of rows that choose at random, through the experts of a few layers in turn."""
    sizes, shape = bench.sizes, bench.sizes.mixture
    section = Section("experts", f"the experts of {shape.name} alone, a layer, {sizes.dtype}")
    section.notes.append(
        "of a copy: bytes of the experts that rows chose, over their time and a copy's rate."
    )
    peak = copy_rate(sizes, bench.device, section)
    bench.say("making the experts")
    own = _experts(bench, shape)
    sides: dict[str, Sequence[nn.Module]] = {_OWN: own, _FUSED: [_fused(each, bench.device) for each in own]}
    for batch in sizes.decode_batches:
        given = [_given(bench, shape, batch) for _ in range(_LAYERS)]
        seconds, shares = {}, {}
        for name, experts in sides.items():
            bench.say(f"{batch} rows, {name}")
            runs = _layer_seconds(bench, section, experts, given)
            seconds[name] = section.add(f"batch {batch}", name, "µs", [1e6 * each for each in runs]).median
            rates = [_num_bytes(bench, shape, given) / each / peak for each in runs]
            percent = [100 * each for each in rates]
            shares[name] = section.add(f"batch {batch}", f"{name}, of a copy", "%", percent).median
        limit = COPY_BARS.get(batch, COPY_BAR)
        section.bars.append(Bar(f"of a copy, batch {batch}", limit, "%", shares[_FUSED], at_least=True))
        ours, theirs = seconds[_FUSED], seconds[_OWN]
        ratio = None if ours is None or theirs is None else ours / theirs
        section.bars.append(Bar(f"of the module's time, batch {batch}", OWN_BAR, "x", ratio, at_least=False))
        bench.keep(section)
    return section


def _experts(bench: Bench, shape: MixtureShape) -> list[Any]:
    """Those of some layers, with random weights."""
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=shape.hidden,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=shape.count,
        num_experts_per_tok=shape.each,
        moe_intermediate_size=shape.width,
        max_position_embeddings=MAX_POSITIONS,
    )
    model: Any = make_model(config, bench.sizes.dtype, bench.device, MAX_POSITIONS).model
    return [layer.mlp.experts for layer in model.base_model.layers]


def _fused(experts: Any, device: torch.device) -> nn.Module:
    """The same fused; where there is no GPU, as they are."""
    if device.type != "cuda":
        return experts  # type: ignore[no-any-return]
    from engine.compute.cuda.fused_experts import FusedExperts  # needs Triton

    return FusedExperts(experts)


def _given(bench: Bench, shape: MixtureShape, batch: int) -> Given:
    """Random rows, each of which chooses different experts."""
    rows = torch.randn(batch, shape.hidden, device=bench.device, dtype=bench.sizes.dtype)
    shares, chosen = torch.rand(batch, shape.count, device=bench.device).topk(shape.each)
    return rows, chosen, (shares / shares.sum(1, keepdim=True)).to(rows.dtype)


def _layer_seconds(
    bench: Bench, section: Section, experts: Sequence[nn.Module], given: Sequence[Given]
) -> list[float]:
    """What the experts of a layer take in several runs, by turns with others; from a graph if it can be."""

    def work() -> None:
        for each, own in zip(experts, given, strict=True):
            each(*own)

    done = _recorded(work, bench.device, section)
    return [each / len(experts) for each in seconds_of(done, bench.device, bench.sizes.repeats)]


def _recorded(work: Callable[[], None], device: torch.device, section: Section) -> Callable[[], None]:
    if device.type != "cuda":
        return work
    try:
        return CudaRecorder(device).record(work)
    except RuntimeError as reason:
        section.notes.append(f"Not recorded as a graph: {str(reason).splitlines()[0]}")
        return work


def _num_bytes(bench: Bench, shape: MixtureShape, given: Sequence[Given]) -> float:
    """What of the weights of a layer is read, on average."""
    chosen = sum(len(set(own[1].flatten().tolist())) for own in given) / len(given)
    return chosen * 3 * shape.hidden * shape.width * bench.sizes.dtype.itemsize
