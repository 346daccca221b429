"""One soak from start to end: the server, its warm-up, the load, the rest after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.processes import JsonWorker, Server
from tests.e2e.command_line import ONE_THREAD, QUIET
from tests.soak.load import Canary, arrivals, crowd
from tests.soak.tally import Tally
from tests.soak.verdict import Findings, Probes
from tests.soak.vitals import Observer
from tests.support.native import WITHOUT_KERNELS
from tests.support.repetitive_world import save_repetitive_model
from tests.support.tool_templates import HERMES

LEAK = ({"point": "block_leak", "count": -1},)
# Less memory than the seats could use, so that requests are preempted; a queue that is full now and then.
_TIGHT = (
    *("--max-num-seqs", "24", "--swap-space", "2MiB"),
    *("--max-queued-requests", "56", "--max-num-batched-tokens", "512"),
    *("--priority-aging-seconds", "2"),  # so that the last class, too, has its turn under constant load
)
_BLOCKS = 66
_BLOCKS_TO_LOSE = 4096  # so that the server outlives its leak: without any block left it could only end
_MAX_MODEL_LEN = 1024  # a tiny tokenizer makes many tokens of a list of tools
_WARM_UP_S = (5.0, 30.0)  # at least, at most


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What to do. `model` None is a tiny one; `arrivals_per_s` None is `num_clients` that take turns.

    `leaks` has the server lose a block with every abort.
    """

    seconds: float
    model: str | None = None
    num_clients: int = 64
    arrivals_per_s: float | None = None
    leaks: bool = False
    seed: int = 0
    flags: tuple[str, ...] = ()  # of the server, in addition

    @property
    def title(self) -> str:
        """In words."""
        load = (
            f"{self.num_clients} clients"
            if self.arrivals_per_s is None
            else f"{self.arrivals_per_s:g} streams a second"
        )
        return f"{load}, {self.seconds:g} s, {self.model or 'a tiny model'}{', leaking' * self.leaks}"

    @property
    def warm_up_s(self) -> float:
        """Time for every path to have been taken."""
        return min(max(self.seconds / 10, _WARM_UP_S[0]), _WARM_UP_S[1])


async def soak(plan: SoakPlan, directory: Path, say: Callable[[str], None]) -> Findings:
    """Run it; `directory` takes the tiny model. Raises ChildFailed when the server is gone before the end."""
    # With compiled kernels, as users have it; every shape of a batch costs torch's own products memory.
    env = {name: value for name, value in QUIET.items() if name not in WITHOUT_KERNELS | ONE_THREAD}
    env["HF_HUB_OFFLINE"] = "1"
    if plan.leaks:
        env |= {"SLIPSTREAM_ALLOW_FAULTS": "1", "SLIPSTREAM_FAULT_PLAN": json.dumps(LEAK)}
    with Server(*_flags(plan, directory), env=env) as server, JsonWorker("tests.soak.prober") as prober:
        say("starting")
        await asyncio.to_thread(server.wait_ready)
        try:
            return await _observe(plan, server, prober, say)
        except* (OSError, EOFError, psutil.Error) as errors:
            gone = errors
        raise server.failed("it is gone, or does not answer") from gone


async def _observe(
    plan: SoakPlan, server: Server, prober: JsonWorker, say: Callable[[str], None]
) -> Findings:
    tally = Tally()
    observer = Observer(server.url, psutil.Process(server.process.pid))
    canary = Canary(server.url, tally)
    await canary.sing()
    say(f"warming up for {plan.warm_up_s:g} s")
    await _load(plan, server.url, tally, plan.warm_up_s, seed=2 * plan.seed + 1)
    before = await observer.rest()
    tally.first_tokens.clear()
    say(f"under load for {plan.seconds:g} s")
    question = {"host": server.host, "port": server.port, "seconds": plan.seconds}
    async with asyncio.TaskGroup() as group:
        endless = [group.create_task(each) for each in (canary.sing_on(), observer.watch())]
        probing = group.create_task(asyncio.to_thread(prober.ask, question, plan.seconds + 60))
        await _load(plan, server.url, tally, plan.seconds, seed=2 * plan.seed)
        await asyncio.wait([probing, *endless], return_when=asyncio.FIRST_COMPLETED)
        for task in endless:
            task.cancel()
    say("coming to rest")
    await canary.sing()
    after = await observer.rest()
    page = await observer.samples()
    await asyncio.to_thread(server.end)
    return Findings(
        tally=tally,
        seen=observer.seen,
        before=before,
        after=after,
        page=page,
        probes=Probes(**probing.result()),
        errors_logged=[line for line in server.stderr_lines() if '"level":"error"' in line],
        exit_code=server.process.returncode,
        saturated_s=None if plan.arrivals_per_s is None else plan.seconds,
    )


def _flags(plan: SoakPlan, directory: Path) -> tuple[str, ...]:
    template = directory / "template.jinja"
    template.write_text(HERMES)
    common = ("--chat-template", str(template), "--log-format", "json", *plan.flags)
    if plan.model is not None:
        return (plan.model, *common)
    model = save_repetitive_model(directory / "model")
    config = model / "config.json"
    facts = json.loads(config.read_text()) | {"max_position_embeddings": _MAX_MODEL_LEN}
    config.write_text(json.dumps(facts))
    blocks = str(_BLOCKS_TO_LOSE if plan.leaks else _BLOCKS)
    return (str(model), "--num-kv-blocks", blocks, *_TIGHT, *common)


async def _load(plan: SoakPlan, url: str, tally: Tally, seconds: float, seed: int) -> None:
    if plan.arrivals_per_s is None:
        await crowd(url, tally, plan.num_clients, seconds, seed)
    else:
        await arrivals(url, tally, plan.arrivals_per_s, seconds)
