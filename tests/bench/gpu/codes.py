"""Steps of a model whose weights are codes of 4 or 8 bits, beside the same model in 16 bits."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import nn

from engine.compute.cuda.coded_choice import multiply_codes
from engine.compute.loading.coded_weights import (
    FP8_MOST,
    CodedLinear,
    CodedWeight,
    CodeKind,
    InputRounding,
    code_kinds,
    float_codes,
    round_weights,
)
from engine.compute.loading.loader import LoadedModel
from engine.startup.build import put_together
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import settings_for
from tests.bench.gpu.made_models import fused, make_model
from tests.bench.gpu.steps import MIXED_PROMPT, StepCase, step_inputs, step_launcher
from tests.bench.report import Bar, Section

# Of the step in 16 bits. At one sequence a step is the reading of its weights: a half of them and a quarter,
# beside the head, which stays in 16 bits. Many sequences are a matter of arithmetic, and must not lose.
# Expectations, which no device has confirmed yet.
FEW_BARS = {"fp8 by rows": 0.65, "fp8 by blocks": 0.65, "int4": 0.45}
MANY_BAR = 1.0
_PLAIN = "16 bits"
_RUNS = 3
_GROUP, _BLOCK = 128, 128


def run_codes(bench: Bench) -> Section:
    """The larger model in each kind of weights, by batch."""
    sizes, shape = bench.sizes, bench.sizes.large
    title = f"{shape.name}, single steps, context {sizes.decode_context}, {sizes.dtype} and codes"
    section = Section("codes", title)
    section.notes.append("Inputs of FP8 are rounded: by rows, or with a scale for each run of columns.")
    plain: dict[int, float] = {}
    for kind in (_PLAIN, *FEW_BARS):
        seconds = _measure(bench, section, kind)
        bench.keep(section)
        if kind == _PLAIN:
            plain = seconds
            continue
        for batch, taken in seconds.items():
            limit = FEW_BARS[kind] if batch == 1 else MANY_BAR
            name = f"{kind}, batch {batch}, of 16 bits"
            section.bars.append(Bar(name, limit, "x", taken / plain[batch], at_least=False))
    return section


def _measure(bench: Bench, section: Section, kind: str) -> dict[int, float]:
    """Seconds of a step by batch. The model is gone after it."""
    sizes, shape = bench.sizes, bench.sizes.large
    context = sizes.decode_context
    bench.say(f"making the {shape.name} of {kind}")
    loaded = make_model(shape.config(), sizes.dtype, bench.device, context + MIXED_PROMPT)
    if kind != _PLAIN:
        use_codes(loaded, kind)
    loaded = fused(loaded)
    if kind != _PLAIN and not code_kinds(loaded.model):
        section.notes.append(f"{kind}: the kernels do not multiply with such codes here.")
    settings = settings_for(max(sizes.decode_batches), context + MIXED_PROMPT)
    runner = put_together(settings, loaded, bench.tokenizer(shape)).runner
    found = {}
    for batch in sizes.decode_batches:
        work = step_launcher(runner, step_inputs(StepCase(batch, context), sizes.small.vocab))
        work(3)
        runs = [work(sizes.steps // 4 + 1)[0] for _ in range(_RUNS)]
        section.add(f"{kind}, batch {batch}", "step", "ms", [1e3 * each for each in runs])
        found[batch] = median(runs)
    return found


@torch.inference_mode()
def use_codes(loaded: LoadedModel, kind: str) -> None:
    """Round all projections but the head to codes of this kind, on kernels where the model is on a GPU."""
    model: Any = loaded.model
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and linear is not model.get_output_embeddings():
            model.set_submodule(name, CodedLinear(_codes_of(linear.weight.float(), kind), linear.bias))
    if loaded.device.type == "cuda":
        multiply_codes(model, loaded.dtype)


def _codes_of(weights: torch.Tensor, kind: str) -> CodedWeight:
    out, width = weights.shape
    if kind == "int4":
        return round_weights(weights, CodeKind.INT4, min(_GROUP, width))
    if kind == "fp8 by rows":
        scales, rounding = weights.abs().amax(1, keepdim=True) / FP8_MOST, InputRounding()
    else:
        block = min(_BLOCK, out, width)
        blocks = weights.view(out // block, block, width // block, block).abs().amax((1, 3)) / FP8_MOST
        scales = blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)
        rounding = InputRounding(block)
    coded = float_codes((weights / scales).to(torch.float8_e4m3fn), scales, rounding)
    assert coded is not None, "blocks are wide enough"
    return coded
