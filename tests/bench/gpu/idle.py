"""How long the device has nothing to do between the steps of the whole engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import uvloop
from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import MadeEngine, decode_step, made_engine, settings_for
from tests.bench.gpu.sizes import LlamaShape
from tests.bench.report import Bar, Section

BAR = 5.0  # percent
_GAP_US = 10.0  # kernels of one graph follow each other within a few microseconds
_SETTLED = 0.3  # of the time that was traced, before which prompts are read and sequences start
_CONTEXT = 256


class Gaps(NamedTuple):
    """Percent of a stretch of time: between the steps, and all that no kernel and no copy filled."""

    between_percent: float
    all_percent: float


def gaps_of(busy: Iterable[tuple[float, float]], min_gap: float) -> Gaps:
    """What lies between intervals (begin, end), which may overlap, from the first begin to the last end.

    A gap of at least `min_gap` lies between steps. Raises ValueError without intervals.
    """
    ordered = sorted(busy)
    if not ordered:
        raise ValueError("the device did nothing")
    begin, end = ordered[0]
    first, idle, between = begin, 0.0, 0.0
    for begin, stop in ordered:
        if begin > end:
            idle += begin - end
            between += begin - end if begin - end >= min_gap else 0.0
        end = max(end, stop)
    whole = max(end - first, 1e-9)
    return Gaps(100 * between / whole, 100 * idle / whole)


class DeviceTrace:
    """When the device was at work, in microseconds, while this was open; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.busy: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Trace what the device does."""
        if self._device.type != "cuda":
            yield
            return
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            yield
            torch.cuda.synchronize(self._device)
        events = trace.events() or ()
        self.busy = [
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]

    def settled(self) -> list[tuple[float, float]]:
        """What was traced after the start."""
        if not self.busy:
            return []
        first, last = min(begin for begin, _ in self.busy), max(end for _, end in self.busy)
        border = first + _SETTLED * (last - first)
        return [(begin, end) for begin, end in self.busy if begin >= border]


def run_idle(bench: Bench) -> Section:
    """Both models, each batch, and the bars."""
    sizes = bench.sizes
    section = Section("idle", f"device idle while decoding, whole engine, context {_CONTEXT}")
    section.notes.append(
        f"between steps: gaps of at least {_GAP_US:g} µs in the device's own trace; all gaps: "
        "shorter ones inside a step, too. by events: from the steps' own times, without a trace."
    )
    for shape in (sizes.small, sizes.large):
        uvloop.run(_measure(bench, section, shape))
    return section


async def _measure(bench: Bench, section: Section, shape: LlamaShape) -> None:
    batches = bench.sizes.idle_batches
    max_tokens = 2 * _CONTEXT + 4 * bench.sizes.steps
    loaded = bench.model(shape, max_tokens)
    settings = settings_for(max(batches), max_tokens)
    async with made_engine(settings, loaded, bench.tokenizer(shape), skip_prompts=True) as made:
        await decode_step(made, max(batches), _CONTEXT, 4)
        for batch in batches:
            bench.say(f"{shape.name}, batch {batch}")
            await _measure_batch(bench, section, made, (shape, batch))
            bench.keep(section)


async def _measure_batch(
    bench: Bench, section: Section, made: MadeEngine, case: tuple[LlamaShape, int]
) -> None:
    shape, batch = case
    name, steps = f"{shape.name}, batch {batch}", bench.sizes.steps
    plain = await decode_step(made, batch, _CONTEXT, steps)
    section.add(name, "step", "ms", [1e3 * plain.seconds])
    section.add(name, "by events", "%", [plain.host_percent])
    trace = DeviceTrace(bench.device)
    with trace.open():
        await decode_step(made, batch, _CONTEXT, steps)
    measured = None
    if trace.settled():
        gaps = gaps_of(trace.settled(), _GAP_US)
        section.add(name, "between steps", "%", [gaps.between_percent])
        section.add(name, "all gaps", "%", [gaps.all_percent])
        measured = gaps.between_percent
    section.bars.append(Bar(f"device idle between steps, {name}", BAR, "%", measured, at_least=False))
