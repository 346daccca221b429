"""What weights of few bits cost in accuracy and save in time: one model in bfloat16, int8 and int4.

Also run as `python -m tests.bench.quantization`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from config import ModelSettings
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.native.compiler import library
from engine.compute.native.forms import choose_build
from engine.compute.native.install import install, with_kernels
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeLinear
from engine.compute.native.quantization import quantize
from engine.compute.native.records import BLOCKS
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.plan.step_records import StepInputs
from engine.startup.build import use_compute_threads
from tests.bench.bare import fill_kv
from tests.bench.context import BenchContext
from tests.bench.machine import REPOSITORY
from tests.bench.report import Bar, Section

WINDOW = 512  # tokens that are judged together
NUM_WINDOWS = 40  # half a percent of perplexity shows in so many
NUM_CONTINUED = 4  # of these windows are continued
PROMPT, CONTINUED = 64, 64  # tokens that are continued, from a window's start and its middle, and by how many
NUM_EXACT = 8  # windows that are computed in float32 throughout, but for inputs of products with codes
ACTIVATIONS_BAR = 0.003  # nats
DECODED = (1, 8, 32)  # sequences that decode at once
CONTEXT_TOKENS = 128  # of each
PREFILLED = 512  # tokens of the prompt that is timed
BLOCK_SIZE = 16
STEPS = 8  # of one timing
# Text that is nobody else's: our own.
TEXTS = (
    *("README.md", "tests/bench/README.md", "deploy/ray/README.md", "deploy/kubernetes/README.md"),
    *("deploy/README.md", "engine/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/bench/RESULTS.md"),
)


class Agreement(NamedTuple):
    """One model beside another: mean divergence in nats, and the part of the same first choices."""

    divergence: float
    same_choice: float


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model by the name of its weights' format."""

    name: str
    loaded: LoadedModel

    @torch.inference_mode()
    def log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of every next token: [len(tokens), vocab] in float32."""
        forward, blocks = PackedForward(self.loaded), range(-(-len(tokens) // BLOCK_SIZE))
        step = pack_step([Part(tokens, 0, len(tokens), blocks)], BLOCK_SIZE, every_row=True)
        return (
            forward(step, forward.make_kv(len(blocks), BLOCK_SIZE, self.loaded.kv_dtype))
            .float()
            .log_softmax(-1)
        )

    @torch.inference_mode()
    def continued(self, prompt: Sequence[int]) -> list[int]:
        """The likeliest tokens after `prompt`, one by one."""
        forward, blocks = PackedForward(self.loaded), range(-(-(len(prompt) + CONTINUED) // BLOCK_SIZE))
        kv = forward.make_kv(len(blocks), BLOCK_SIZE, self.loaded.kv_dtype)
        tokens, first = list(prompt), 0
        while len(tokens) < len(prompt) + CONTINUED:
            step = pack_step([Part(tokens, first, len(tokens), blocks)], BLOCK_SIZE)
            first = len(tokens)
            tokens.append(int(forward(step, kv)[0].argmax()))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def step_s(self, step: StepInputs) -> float:
        """The seconds of one pass over a step, in a loop of a few; what lies before it is constants."""
        forward = PackedForward(self.loaded)
        kv = forward.make_kv(int(step.block_tables.max()) + 1, BLOCK_SIZE, self.loaded.kv_dtype)
        fill_kv(kv)
        forward(step, kv)
        started = perf_counter()
        for _ in range(STEPS):
            forward(step, kv)
        return (perf_counter() - started) / STEPS


def run_quantization(context: BenchContext) -> list[Section]:
    """Accuracy and speed."""
    use_compute_threads()
    directory = context.model_directory
    settings = context.settings.model.model_copy(update={"compile": "on"})
    models = []
    for name in ("none", "int8", "int4"):
        context.say(f"loading the model, quantization {name}")
        asked = settings.model_copy(update={"quantization": name})
        loaded = load_model(directory, asked)
        served = with_kernels(loaded, asked, context.settings.home, lambda: loaded)  # noqa: B023 - used at once
        models.append(Model("bfloat16" if name == "none" else name, served))
    windows = read_windows(directory)
    exact = Model("float32", load_model(directory, settings.model_copy(update={"dtype": "float32"})))
    context.say("reading texts")
    accuracy = measure_accuracy([exact, *models], windows)
    context.say("continuing texts")
    measure_divergence(accuracy, [exact, *models], windows[:NUM_CONTINUED])
    del exact
    context.say("reading texts with weights as they are and activations in integers, and in float32")
    activations = measure_activations(directory, settings, context.settings.home, windows[:NUM_EXACT])
    context.say("timing steps")
    return [accuracy, activations, measure_speed(models, context.runs)]


def read_windows(directory: Path) -> list[list[int]]:
    """The texts' first tokens, as many as are judged, cut into windows."""
    text = "\n".join((REPOSITORY / name).read_text(encoding="utf-8") for name in TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokens = tokenizer(text[: NUM_WINDOWS * WINDOW * 8], add_special_tokens=False)["input_ids"]
    return [tokens[start * WINDOW : (start + 1) * WINDOW] for start in range(NUM_WINDOWS)]


def measure_accuracy(models: Sequence[Model], windows: Sequence[list[int]]) -> Section:
    """Perplexity of each model, and each beside those before it."""
    losses: dict[str, list[float]] = {model.name: [] for model in models}
    agreements: dict[tuple[str, str], list[Agreement]] = {}
    for window in windows:
        found = {model.name: model.log_probabilities(window) for model in models}
        following = torch.tensor(window[1:])[:, None]
        for name, log_p in found.items():
            losses[name].append(float(-log_p[:-1].gather(1, following).mean()))
        for one, other in combinations(found, 2):
            agreements.setdefault((one, other), []).append(agreement(found[one], found[other]))
    section = Section("accuracy", f"{len(windows)} windows of {WINDOW} tokens of our own documentation")
    of_windows = {name: torch.tensor(means) for name, means in losses.items()}
    for name, loss in of_windows.items():
        section.add(name, "perplexity", "", [float(loss.mean().exp())])
    for one, other in combinations(of_windows, 2):
        section.add(
            f"{other} beside {one}", "more perplexity", "%", added(of_windows[one], of_windows[other])
        )
    for (one, other), parts in agreements.items():
        case = f"{other} beside {one}"
        section.add(case, "KL divergence", "nats", [statistics.fmean(part.divergence for part in parts)])
        same = statistics.fmean(part.same_choice for part in parts)
        section.add(case, "same likeliest token", "%", [100 * same])
    section.notes.append("float32: transformers' own forward of the same stored weights.")
    return section


def added(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """How much more perplexity the other has, in percent, with two standard errors around it.

    Of both losses of each window: those of its tokens hang together.
    """
    differences = other - one
    mean, error = float(differences.mean()), float(differences.std()) / len(differences) ** 0.5
    return [100 * (math.exp(mean + by * error) - 1) for by in (-2, 0, 2)]


def agreement(exact: torch.Tensor, other: torch.Tensor) -> Agreement:
    """Of two [tokens, vocab] of log probabilities."""
    divergence = (exact.exp() * (exact - other)).sum(-1).mean()
    return Agreement(float(divergence), float((exact.argmax(-1) == other.argmax(-1)).float().mean()))


def measure_activations(
    directory: Path, settings: ModelSettings, home: Path, windows: Sequence[list[int]]
) -> Section:
    """What integers in place of activations change: the same codes of weights, all else in float32."""
    section = Section("activations", f"in integers beside float32, {len(windows)} windows of {WINDOW} tokens")
    settings = settings.model_copy(update={"dtype": "float32"})
    build = choose_build(torch.float32, settings.cpu_kernels, formats=True)
    kernels = NativeKernels(library(home, build), torch.float32)
    for name in ("int8", "int4"):
        loaded = install(load_model(directory, settings), kernels)
        quantize(loaded, kernels, name)
        section.bars.append(activations_bar(name, Model(name, loaded), windows))
    return section


def activations_bar(name: str, model: Model, windows: Sequence[list[int]]) -> Bar:
    """Of a model in float32, whose layers are not joined and whose weights become float32 too."""
    found = [model.log_probabilities(window) for window in windows]
    for module in model.loaded.model.modules():
        if isinstance(module, NativeLinear) and module.weights.kind == BLOCKS:
            codes = module.weights
            numbers = module.kernels.read_rows(codes, torch.arange(codes.out))
            module.weights = module.kernels.pack(numbers, codes.bias)
    exact = map(model.log_probabilities, windows)
    mean = statistics.fmean(agreement(one, other).divergence for one, other in zip(exact, found, strict=True))
    about = f"KL divergence by activations in integers, {name}"
    return Bar(about, ACTIVATIONS_BAR, "nats", mean, at_least=False)


def measure_divergence(section: Section, models: Sequence[Model], windows: Sequence[list[int]]) -> None:
    """Where greedy continuations by two models part, in tokens; those that never do count as whole."""
    prompts = [window[start : start + PROMPT] for window in windows for start in (0, WINDOW // 2)]
    texts = {model.name: [model.continued(prompt) for prompt in prompts] for model in models}
    for one, other in combinations(texts, 2):
        shared = [parted(*pair) for pair in zip(texts[one], texts[other], strict=True)]
        section.add(f"{other} beside {one}", f"greedy, same first of {CONTINUED}", "tokens", shared)


def parted(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts of one length begin with in common."""
    pairs = zip(one, other, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(one))


def measure_speed(models: Sequence[Model], runs: int) -> Section:
    """Passes over the same steps, by each model in turns."""
    section = Section("speed", f"one pass, decodes at {CONTEXT_TOKENS} tokens of context")
    for name, step in timed_steps():
        times: dict[str, list[float]] = {model.name: [] for model in models}
        for _ in range(runs):
            for model in models:
                times[model.name].append(model.step_s(step))
        for kind, values in times.items():
            section.add(name, kind, "ms", [1e3 * value for value in values])
        plain, *others = times
        for other in others:
            ratios = [a / b for a, b in zip(times[plain], times[other], strict=True)]
            section.add(name, f"{other}, ratio", "x", ratios)
    return section


def timed_steps() -> list[tuple[str, StepInputs]]:
    """Steps by name: decodes of so many sequences, and a prompt."""
    tokens = [100 + number % 1000 for number in range(PREFILLED)]
    blocks = -(-CONTEXT_TOKENS // BLOCK_SIZE)
    steps = []
    for count in DECODED:
        parts = [
            Part(tokens, CONTEXT_TOKENS - 1, CONTEXT_TOKENS, range(row * blocks, (row + 1) * blocks))
            for row in range(count)
        ]
        steps.append((f"{count} decoding", pack_step(parts, BLOCK_SIZE)))
    prompt = Part(tokens, 0, PREFILLED, range(-(-PREFILLED // BLOCK_SIZE)))
    return [*steps, (f"prompt of {PREFILLED}", pack_step([prompt], BLOCK_SIZE))]


if __name__ == "__main__":
    from tests.bench.command import run

    sys.exit(run(["quantization", *sys.argv[1:]]))
