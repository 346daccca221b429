"""The pass with each form of the kernels and without, its products alone, and torch.compile beside them.

Everything of one table runs in one process, in turns, but for torch.compile, which a process of its own is
given a time for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from config import load_settings
from engine.compute.native.compiler import library
from engine.compute.native.forms import NativeUnavailable, choose_build, forms_of
from engine.compute.native.kernels import NativeKernels
from engine.compute.runner.model_runner import ModelRunner
from engine.errors import StartRefused
from engine.startup.build import load_parts
from tests.bench.bare import BareModel, model_runner
from tests.bench.context import BenchContext
from tests.bench.processes import JsonWorker
from tests.bench.products import (
    Maker,
    Products,
    joined_weights,
    onednn_multiplies,
    packed_by_onednn,
    packed_by_us,
    plain,
)
from tests.bench.report import Section
from tests.bench.streams import BenchmarkFailed

DECODES = (1, 4, 8, 16, 32, 128)
PROMPTS = (128, 512)
CONTEXT_TOKENS = 256
PASS_S = 0.5  # how long each case runs, about
PRODUCT_ROWS = (1, 4, 8, 16, 32, 128, 512)
MEMORY = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--speculative-method", "none")
INDUCTOR_BATCHES = (1, 8, 32)
INDUCTOR_STEPS = 32
INDUCTOR_TIME_BOX_S = 420.0  # for each batch size


def load_runner(context: BenchContext, compile_kernels: str, form: str = "auto") -> ModelRunner:
    """The model, with little K/V. Raises StartRefused where kernels are asked for and cannot be had."""
    flags = (*context.flags, *MEMORY, "--compile", compile_kernels, "--cpu-kernels", form)
    return model_runner(load_parts(load_settings(list(flags))).runner)


def run_kernels(context: BenchContext) -> list[Section]:
    """The sections of the benchmark; everything on one thread, like the engine's target thread."""
    with ThreadPoolExecutor(1) as thread:
        sections = thread.submit(measure, context).result()
    return [*sections, inductor_section(context)]


def measure(context: BenchContext) -> list[Section]:
    """The passes and the products."""
    context.say("loading the model without kernels")
    runners = {"compile off": load_runner(context, "off")}
    served = runners["compile off"].forward.loaded
    if served.device.type != "cpu":
        raise BenchmarkFailed("kernels: these are measured on a CPU only")
    note = ""
    try:
        for form in forms_of():
            if form.is_here and served.dtype in form.dtypes:
                context.say(f"loading the model with kernels for {form.name}")
                runners[form.name] = load_runner(context, "on", form.name)
    except StartRefused as refusal:
        note = str(refusal)
    passes = passes_section(context, runners)
    products = products_section(context, runners["compile off"])
    for section in (passes, products):
        section.notes += [note] if note else []
    return [passes, products]


def passes_section(context: BenchContext, runners: Mapping[str, ModelRunner]) -> Section:
    """Milliseconds of a bare pass and the likeliest token of each row."""
    section = Section("kernels", f"a bare pass, decodes at context {CONTEXT_TOKENS}")
    cases = {f"{n} decoding": (n, CONTEXT_TOKENS - 1, CONTEXT_TOKENS) for n in DECODES}
    cases |= {f"a prompt of {n}": (1, 0, n) for n in PROMPTS}
    for case, (num_sequences, first, stop) in cases.items():
        context.say(f"kernels, {case}")
        token_ids = context.words.token_ids
        bare = {
            name: BareModel(runner, token_ids, num_sequences, first, stop, real_kv=False)
            for name, runner in runners.items()
        }
        steps = {name: max(3, int(PASS_S / one.step_s(2))) for name, one in bare.items()}
        runs: dict[str, list[float]] = {name: [] for name in bare}
        for _ in range(context.runs):
            for name, one in bare.items():
                runs[name].append(1e3 * one.step_s(steps[name]))
        for name, times in runs.items():
            section.add(case, name, "ms", times)
        plain_ms = runs.pop("compile off")
        for name, times in runs.items():
            pairs = zip(plain_ms, times, strict=True)
            section.add(case, f"off / {name}", "x", [off / on for off, on in pairs])
    return section


def products_section(context: BenchContext, runner: ModelRunner) -> Section:
    """Milliseconds of all products of a step."""
    section = Section("kernels: products", "all matrix products of a step, nothing else")
    model = runner.forward.loaded.model
    layers, head = joined_weights(model), model.get_output_embeddings().weight
    if not layers or head.dtype is not torch.bfloat16:
        section.notes.append("Not measured: the model is not like Llama, or not in bfloat16.")
        return section
    makers: dict[str, Maker] = {"torch": plain}
    if onednn_multiplies(head.dtype):
        makers["oneDNN, packed"] = packed_by_onednn
    else:
        section.notes.append("oneDNN is left out: it packs no bfloat16 weights on this CPU.")
    try:
        makers["ours"] = packed_by_us(NativeKernels(library(context.settings.home, choose_build(head.dtype))))
    except NativeUnavailable as reason:
        section.notes.append(f"Ours cannot be had: {reason}")
    sides = {name: Products(layers, head, make) for name, make in makers.items()}
    for rows in PRODUCT_ROWS:
        context.say(f"kernels, products of {rows} rows")
        runs: dict[str, list[float]] = {name: [] for name in sides}
        steps = {name: max(3, int(PASS_S / side.step_s(rows, 1))) for name, side in sides.items()}
        for _ in range(context.runs):
            for name, side in sides.items():
                runs[name].append(1e3 * side.step_s(rows, steps[name]))
        for name, times in runs.items():
            section.add(f"{rows} rows", name, "ms", times)
    num_bytes = sum(weight.nbytes for weight in (*layers, head))
    section.notes.append(f"The weights are {num_bytes / 1e6:.0f} MB.")
    return section


def inductor_section(context: BenchContext) -> Section:
    """torch.compile of transformers' decode step, frozen, over a dense K/V cache: once, it takes minutes."""
    section = Section("kernels: torch.compile", "transformers' own decode step, dense K/V, no sampling")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        section.notes.append("Not measured: inductor needs a C++ compiler.")
        return section
    with JsonWorker("tests.bench.inductor_worker", str(context.model_directory)) as worker:
        for batch in INDUCTOR_BATCHES:
            context.say(f"torch.compile, batch {batch}")
            question = {"batch": batch, "context": CONTEXT_TOKENS, "steps": INDUCTOR_STEPS}
            try:
                found = worker.ask(question, INDUCTOR_TIME_BOX_S)
            except BenchmarkFailed as failure:
                section.notes.append(f"batch {batch}: {failure}")
                break
            section.add(f"batch {batch}", "plain", "ms", [found["plain_ms"]])
            section.add(f"batch {batch}", "compiled", "ms", [found["compiled_ms"]])
            section.add(f"batch {batch}", "compiling", "s", [found["compile_s"]])
    return section
