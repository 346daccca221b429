"""A mixture of experts: the layers' experts alone, and whole passes, against transformers' loop over experts.

A random model of Qwen3-MoE's widths with 64 experts, 8 of them chosen, four layers and 32,768 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import Qwen3MoeConfig

from engine.compute.native.decoder import NativeDecoder
from engine.compute.runner.model_runner import ModelRunner
from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.families import Shape, save_random
from tests.bench.kernels import CONTEXT_TOKENS, PASS_S, load_runner
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed
from tests.support.tiny_models import VOCAB_SIZE

BAR = 3.0
BARRED = (1, 8)  # batches
DECODES = (1, 8, 32)
PROMPT = 512
EAGER, OURS = "eager experts", "kernels"
HIDDEN, EXPERTS, CHOSEN = 2048, 64, 8


def shape() -> Qwen3MoeConfig:
    """Qwen3-30B-A3B with half of its experts and few of its layers."""
    return Qwen3MoeConfig(
        **Shape(HIDDEN, 6144, 32, 4, 128).options(),
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )


@dataclass(frozen=True)
class LayersExperts:
    """The experts of all layers of a model; each layer has rows of its own, which its router has spread."""

    experts: tuple[Any, ...]
    given: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, runner: ModelRunner, num_rows: int) -> LayersExperts:
        """Random rows, the same for every model."""
        generator = torch.Generator().manual_seed(num_rows)
        layers = layers_of(runner)
        given = []
        for layer in layers:
            rows = torch.randn(num_rows, HIDDEN, generator=generator).bfloat16()
            _, shares, chosen = layer.mlp.gate(rows)
            given.append((rows, chosen, shares))
        return cls(tuple(layer.mlp.experts for layer in layers), tuple(given))

    @torch.inference_mode()
    def step_s(self, num_steps: int) -> float:
        """Mean seconds of all layers' experts, one after the other."""
        started = perf_counter()
        for _ in range(num_steps):
            for experts, given in zip(self.experts, self.given, strict=True):
                experts(*given)
        return (perf_counter() - started) / num_steps

    @property
    def num_bytes(self) -> int:
        """Of the weights that their rows go through."""
        each = 3 * HIDDEN * self.experts[0].down.in_features * torch.bfloat16.itemsize
        return sum(each * len(set(chosen.flatten().tolist())) for _, chosen, _ in self.given)


def layers_of(runner: ModelRunner) -> Any:
    """A model's layers, whoever computes them."""
    base = runner.forward.loaded.model.base_model
    return (base.plain if isinstance(base, NativeDecoder) else base).layers


def load_sides(context: BenchContext) -> dict[str, ModelRunner]:
    """The model as transformers computes it, one expert after the other, and on the kernels."""
    sides = {EAGER: load_runner(context, "off"), OURS: load_runner(context, "on")}
    sides[EAGER].forward.loaded.model.set_experts_implementation("eager")
    if not isinstance(sides[OURS].forward.loaded.model.base_model, NativeDecoder):
        raise BenchmarkFailed("moe: not all layers are computed in one call")
    return sides


def add_case(
    context: BenchContext, section: Section, case: str, step_s: Mapping[str, Callable[[int], float]]
) -> float | None:
    """Milliseconds of each side by turns; how many times faster ours is."""
    context.say(f"moe, {section.title}, {case}")
    steps = {name: max(2, int(PASS_S / one(2))) for name, one in step_s.items()}
    runs: dict[str, list[float]] = {name: [] for name in step_s}
    for _ in range(context.runs):
        for name, one in step_s.items():
            runs[name].append(1e3 * one(steps[name]))
    for name, times in runs.items():
        section.add(case, name, "ms", times)
    ratios = [eager / ours for eager, ours in zip(runs[EAGER], runs[OURS], strict=True)]
    return section.add(case, f"{EAGER} / {OURS}", "x", ratios).median


def experts_section(context: BenchContext, sides: Mapping[str, ModelRunner]) -> Section:
    """The experts alone."""
    section = Section("moe", "the experts of four layers, nothing else")
    for num_rows in (*DECODES, PROMPT):
        alone = {name: LayersExperts.of(runner, num_rows) for name, runner in sides.items()}
        case = f"{num_rows} rows"
        ratio = add_case(context, section, case, {name: one.step_s for name, one in alone.items()})
        section.notes.append(f"{case}: {alone[OURS].num_bytes / 1e6:.0f} MB of weights.")
        if num_rows in BARRED:
            section.bars.append(Bar(f"{case}: kernels over eager", BAR, "x", ratio, at_least=True))
    return section


def passes_section(context: BenchContext, sides: Mapping[str, ModelRunner]) -> Section:
    """Whole passes: attention, routers and the head too."""
    section = Section("moe: passes", f"a bare pass, decodes at context {CONTEXT_TOKENS}")
    cases = {f"{n} decoding": (n, CONTEXT_TOKENS - 1, CONTEXT_TOKENS) for n in DECODES}
    for case, given in (cases | {f"a prompt of {PROMPT}": (1, 0, PROMPT)}).items():
        bare = {
            name: BareModel(runner, range(3, VOCAB_SIZE), *given, real_kv=False)
            for name, runner in sides.items()
        }
        add_case(context, section, case, {name: one.step_s for name, one in bare.items()})
    return section


def measure(context: BenchContext) -> list[Section]:
    """Both sections, of one model."""
    with TemporaryDirectory() as directory:
        context.say("moe, making the model")
        save_random(shape(), Path(directory))
        sides = load_sides(replace(context, flags=("--model", directory, "--dtype", "bfloat16")))
    return [experts_section(context, sides), passes_section(context, sides)]


def run_moe(context: BenchContext) -> list[Section]:
    """The sections of the benchmark; everything on one thread, like the engine's target thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure, context).result()
