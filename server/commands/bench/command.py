"""The command `slipstream bench`: a plan carried out, shown and written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from server.commands.bench.client_load import ClientWatch
from server.commands.bench.draft_speedup import read_draft_speedup
from server.commands.bench.flags import bench_parser, read_plan
from server.commands.bench.live_display import LiveDisplay
from server.commands.bench.load_run import LoadRun
from server.commands.bench.plan import BenchPlan
from server.commands.bench.prompts import Prompts, calibrate, read_prompts
from server.commands.bench.result import BenchResult, make_report
from server.commands.bench.summary import summarize
from server.commands.bench.tables import show_result
from server.commands.command_line import wants_help
from server.commands.event_loop import loop_factory
from server.commands.remote.address import Address
from server.commands.remote.failures import RemoteError
from server.commands.remote.http_client import HttpClient
from server.commands.remote.models import first_model

OK, FAULT, INTERRUPTED = 0, 1, 130

_SPARE_FILES = 64  # beside one socket a request


def run(argv: Sequence[str]) -> int:
    """Measure as `argv` says; the exit code. Raises SettingsError before anything is sent.

    0 measured, 1 no request succeeded, 130 ended by Ctrl-C.
    """
    if wants_help(argv):
        print(bench_parser().format_help(), end="")
        return OK
    plan = read_plan(argv)
    file = plan.workload.prompt_file
    lines = [] if file is None else read_prompts(file)
    allow_open_files(_SPARE_FILES + (plan.load.concurrency or 65536))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            result = runner.run(measure(plan, lines))
    except RemoteError as error:
        print(f"slipstream: bench: {error}", file=sys.stderr)
        return FAULT
    return _tell(result)


async def measure(plan: BenchPlan, lines: Sequence[Mapping[str, Any]]) -> BenchResult:
    """Carry `plan` out. Raises RemoteError when the server cannot be reached or refuses the warm-up."""
    client = HttpClient(plan.address)
    try:
        model = plan.model or await first_model(client, plan.address)
        words_of = await calibrate(client, plan.address, model, plan.workload)
        prompts = Prompts(plan.workload, model, words_of, lines)
        endpoint = "/chat/completions" if plan.workload.endpoint == "chat" else "/completions"
        load_run = LoadRun(client, plan.address.base + endpoint, prompts, plan.load)
        await load_run.warm_up()
        version = await _server_version(client, plan.address)
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        watch = ClientWatch()
        async with LiveDisplay(load_run.counts, plan.load, Console(stderr=True)), watch:
            interrupted = await _run_until_interrupt(load_run)
        summary = summarize(load_run.records, load_run.ended - load_run.started, plan.slos)
        has_drafts = summary.drafts is not None and summary.drafts.num_proposed > 0
        speedup = await read_draft_speedup(client, plan.address) if has_drafts else None
    finally:
        client.close()
    return BenchResult(
        plan=plan,
        model=model,
        server_version=version,
        is_input_measured=words_of.is_measured,
        began=began,
        started=load_run.started,
        interrupted=interrupted,
        records=load_run.records,
        summary=summary,
        client=watch.load,
        speedup=speedup,
    )


async def _run_until_interrupt(load_run: LoadRun) -> bool:
    """Run the load; True when Ctrl-C ended it."""
    task = asyncio.create_task(load_run.run())
    with _on_interrupt(task.cancel):
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
    if task.cancelled():
        return True
    task.result()
    return False


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """While entered, Ctrl-C does `call` in the event loop, where the platform lets it."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, call)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows; or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _server_version(client: HttpClient, address: Address) -> str | None:
    """What GET /version says; None where there is none."""
    try:
        reply = await client.fetch("GET", f"{address.root}/version")
        return str(json.loads(reply.body)["version"]) if reply.status == 200 else None
    except (RemoteError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _tell(result: BenchResult) -> int:
    """Print and write the result; the exit code."""
    plan = result.plan
    show_result(result, Console(stderr=plan.json == "-"))
    code = OK if result.summary.num_succeeded else FAULT
    if plan.json is not None:
        code = max(code, _write(plan.json, lambda: _write_json(result, plan.json or "-")))
    if plan.plot is not None:
        from server.commands.bench.plots import draw_charts

        path = plan.plot
        code = max(code, _write(str(path), lambda: draw_charts(result, path)))
    return INTERRUPTED if result.interrupted else code


def _write(name: str, write: Callable[[], None]) -> int:
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"slipstream: bench: {name} cannot be written: {error.strerror}", file=sys.stderr)
        return FAULT
    return OK


def _write_json(result: BenchResult, name: str) -> None:
    text = json.dumps(make_report(result), indent=1) + "\n"
    if name == "-":
        sys.stdout.write(text)
    else:
        Path(name).write_text(text, encoding="utf-8")


def allow_open_files(wanted: int) -> None:
    """Raise this process's limit of open files to `wanted`, as far as it may."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
