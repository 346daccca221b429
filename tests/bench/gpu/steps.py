"""Single steps of the runner: what each kernel takes of them, and what a prompt among decodes costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import StepInputs
from engine.startup.build import put_together
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_trace import DeviceTrace
from tests.bench.gpu.engines import settings_for
from tests.bench.gpu.made_models import BLOCK_SIZE
from tests.bench.report import Bar, Section

MIXED_BAR = 1.4
_RUNS = 3
_SHOWN_KERNELS = 14
MIXED_PROMPT = 128


class StepCase(NamedTuple):
    """Sequences that decode, each with so much context, and the prompt that is read beside them."""

    decodes: int
    context: int
    prompt: int = 0

    def __str__(self) -> str:
        decodes = f"{self.decodes} decodes after {self.context}"
        return f"{decodes} and {self.prompt} of a prompt" if self.prompt else decodes


def run_steps(bench: Bench) -> Section:
    """The larger model's steps, and the bar of the mixed one."""
    sizes, shape = bench.sizes, bench.sizes.large
    section = Section("steps", f"{shape.name}, single steps of the runner, {sizes.dtype}")
    most, context = max(*sizes.decode_batches, sizes.mixed_decodes), sizes.decode_context
    loaded = bench.model(shape, context + MIXED_PROMPT)
    settings = settings_for(most + 1, context + MIXED_PROMPT)
    runner = put_together(settings, loaded, bench.tokenizer(shape)).runner
    plain, mixed = (
        StepCase(sizes.mixed_decodes, context),
        StepCase(sizes.mixed_decodes, context, MIXED_PROMPT),
    )
    seconds = {}
    for case in (*(StepCase(batch, context) for batch in sizes.decode_batches), plain, mixed):
        bench.say(str(case))
        seconds[case] = _measure(bench, section, runner, case)
        bench.keep(section)
    section.bars.append(
        Bar("a prompt beside decodes", MIXED_BAR, "x", seconds[mixed] / seconds[plain], at_least=False)
    )
    section.notes.append("Step: launched one behind the other. Launch: the host's part of one.")
    return section


def _measure(bench: Bench, section: Section, runner: StepRunner, case: StepCase) -> float:
    """Seconds of one such step."""
    inputs, steps = step_inputs(case, bench.sizes.small.vocab), bench.sizes.steps // 4 + 1
    work = step_launcher(runner, inputs)
    work(3)
    runs = [work(steps) for _ in range(_RUNS)]
    section.add(str(case), "step", "ms", [1e3 * whole for whole, _ in runs])
    section.add(str(case), "launch", "ms", [1e3 * launch for _, launch in runs])
    trace = DeviceTrace(bench.device)
    with trace.open():
        work(steps)
    if trace.works:
        section.notes.append(f"{case}: {trace.by_kernel(steps, _SHOWN_KERNELS)}")
    return median(whole for whole, _ in runs)


def step_inputs(case: StepCase, vocab_size: int) -> StepInputs:
    """A step whose keys and values are whatever lies in the blocks."""
    blocks = -(-(case.context + MIXED_PROMPT) // BLOCK_SIZE)
    tokens = random.Random(0).choices(range(2, vocab_size), k=case.context)
    parts = [
        Part(tokens, case.context - 1, case.context, range(row * blocks, (row + 1) * blocks))
        for row in range(case.decodes)
    ]
    if case.prompt:
        last = case.decodes
        parts.append(Part(tokens * 2, 0, case.prompt, range(last * blocks, (last + 1) * blocks)))
    return pack_step(parts, BLOCK_SIZE)


def step_launcher(runner: StepRunner, inputs: StepInputs) -> Callable[[int], tuple[float, float]]:
    """Does so many steps: (seconds of each, of them those of its launch)."""

    def launch(count: int) -> tuple[float, float]:
        began = perf_counter()
        if isinstance(runner, CudaRunner):
            flying = [runner.launch(inputs) for _ in range(count)]
            launched = perf_counter()
            flying[-1].wait()
        else:
            for _ in range(count):
                runner.run(inputs)
            launched = perf_counter()
        return (perf_counter() - began) / count, (launched - began) / count

    return launch
