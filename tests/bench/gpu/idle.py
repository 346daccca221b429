"""How long the device has nothing to do between the steps of the whole engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import uvloop

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.device_trace import DeviceTrace, Work
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


def settled(works: Sequence[Work]) -> list[tuple[float, float]]:
    """When the device was at work after the start of what was traced."""
    if not works:
        return []
    first, last = min(work.begin for work in works), max(work.end for work in works)
    border = first + _SETTLED * (last - first)
    return [(work.begin, work.end) for work in works if work.begin >= border]


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
    if busy := settled(trace.works):
        gaps = gaps_of(busy, _GAP_US)
        section.add(name, "between steps", "%", [gaps.between_percent])
        section.add(name, "all gaps", "%", [gaps.all_percent])
        measured = gaps.between_percent
    section.bars.append(Bar(f"device idle between steps, {name}", BAR, "%", measured, at_least=False))
