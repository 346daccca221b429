"""`python -m tests.bench.draft_schedules [--draft-model DIR]`: the default's drafters or a pair, by schedule.

One engine each, all in this process and on the same weights' copies; only one has requests at a time, by
turns, until each has been asked for as long. What an engine tries and learns at first counts. "fixed"
verifies four drafts in every round whatever they bring, so that the schedules themselves can be compared;
the others draft as the defaults have it, which may be not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engine import prepare_process
from tests.bench.machine import REPOSITORY, CpuWatch, about

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from engine.loop.engine import Engine
    from tests.bench.report import Section

FIXED = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
ARMS = {
    "off": ("--speculative-method", "none"),
    "sync, fixed": ("--speculation-schedule", "sync", *FIXED),
    "async, fixed": ("--speculation-schedule", "async", *FIXED),
    "sync": ("--speculation-schedule", "sync"),
    "async": ("--speculation-schedule", "async"),
    "auto": ("--speculation-schedule", "auto"),
}
BAR = 0.97
TOKENS = 160


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.draft_schedules")
    parser.add_argument(
        "--draft-model", type=Path, help="what draft_pair made (default: the default's drafters)"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each is asked (default 60)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the requests (default 0)")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which ones (default all)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--json", type=Path, default=REPOSITORY / ".bench" / "draft-schedules.json")
    return parser.parse_args()


def main() -> int:
    """Tune this process as the server tunes itself, which must come before torch, then measure."""
    arguments = read_arguments()
    prepare_process()
    import uvloop
    from rich.console import Console

    from tests.bench.report import report_json

    with CpuWatch() as watch:
        section = uvloop.run(measure(arguments, Console(stderr=True)))
    section.other_cpu_percent = watch.other_percent
    section.show(Console())
    drafter = "the default's" if arguments.draft_model is None else arguments.draft_model.name
    report = report_json(about() | {"drafter": drafter}, [section])
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


async def measure(arguments: argparse.Namespace, console: Console) -> Section:
    """All arms at all batch sizes, turn by turn."""
    from config import load_settings
    from tests.bench.context import BenchContext
    from tests.bench.decode import loaded_engine
    from tests.bench.report import Section
    from tests.bench.speculation import QUESTIONS

    pair: tuple[str, ...] = ()
    if arguments.draft_model is not None:
        pair = ("--speculative-method", "draft-model", "--draft-model", str(arguments.draft_model))
    section = Section("draft schedules", f"by schedule; ordinary text, T {arguments.temperature:g}")
    async with AsyncExitStack() as stack:
        engines = {}
        for arm in arguments.arms:
            flags = ARMS[arm] if arm == "off" else (*pair, *ARMS[arm])
            settings = load_settings(["--kv-cache-memory", "256MiB", "--max-model-len", "2048", *flags])
            context = BenchContext(settings, flags, 1, console.print)
            engines[arm] = (await stack.enter_async_context(loaded_engine(context))).engine
        text = next(iter(engines.values())).text
        prompts = [await text.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
        for batch in arguments.batches:
            await measure_batch(arguments, console, section, engines, prompts, batch)
    return section


async def measure_batch(
    arguments: argparse.Namespace,
    console: Console,
    section: Section,
    engines: dict[str, Engine],
    prompts: Sequence[list[int]],
    batch: int,
) -> None:
    """Every arm at one batch size, the next questions each turn, who begins rotating."""
    from tests.bench.report import Bar
    from tests.bench.speculation import Case

    cases = {
        arm: Case(f"batch {batch}, {arm}", (), TOKENS, arguments.temperature, BAR, batch) for arm in engines
    }
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    arms, turn = list(engines), 0
    while min(seconds.values()) < arguments.seconds:
        chosen = [prompts[(turn * batch + i) % len(prompts)] for i in range(batch)]
        for arm in (*arms[turn % len(arms) :], *arms[: turn % len(arms)]):
            case = cases[arm]
            case.prompts = chosen
            case.on.append(await case.rate(engines[arm], turn, enabled=True))
            count = sum(map(len, case.replies))
            tokens[arm] += count
            seconds[arm] += count / case.on[-1]
        turn += 1
        console.print(
            f"… batch {batch}, {min(seconds.values()):.0f} of {arguments.seconds:.0f} s: "
            + ", ".join(f"{arm} {tokens[arm] / seconds[arm]:.1f}" for arm in arms)
        )
    rates = {arm: tokens[arm] / seconds[arm] for arm in arms}
    for arm, case in cases.items():
        section.add(case.name, "rate of all its time", "tokens/s", [rates[arm]])
        section.add(case.name, "a turn", "tokens/s", case.on)
        section.add(case.name, "acceptance", "", [case.stats.acceptance_rate])
        section.add(case.name, "tokens a round", "", [case.tokens_a_round])
    if "auto" in rates and len(rates) > 1:
        best = max(rates[arm] for arm in ("off", "sync", "async") if arm in rates)
        name = f"batch {batch}: auto over the best of off, sync, async"
        section.bars.append(Bar(name, BAR, "x", rates["auto"] / best, at_least=True))


if __name__ == "__main__":
    sys.exit(main())
