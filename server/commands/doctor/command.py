"""The command `slipstream doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console

from config import Settings, load_settings
from server.commands.command_line import wants_help

if TYPE_CHECKING:  # they bring the model libraries along, for which a wrong flag should not wait
    from server.commands.doctor.report import LoadFacts, Report

OK, FAULT = 0, 1

DOCTOR_HELP: Final = """\
usage: slipstream doctor [MODEL] [--json] [--load] [serve's options]

Says what `slipstream serve` would use with the same options, and why: device, number format, kernels, model,
memory, port. Says too what would stop it, and what to do. No weights are loaded and no network is used.

options:
  -h, --help                        show this help; serve --help lists the settings
  --json                            print the findings as JSON, sizes in bytes
  --load                            load the model too, let it check itself and make a few tokens

examples:
  slipstream doctor
  slipstream doctor ./my-model --kv-cache-memory 8GiB --port 9000
  slipstream doctor --json | jq .problems

exit code: 0 serve would start, 1 it would not, 2 wrong usage or settings
"""

_OWN_FLAGS: Final = frozenset({"--json", "--load"})
_NUM_TOKENS: Final = 32


def run(argv: Sequence[str]) -> int:
    """Examine what `argv` asks for; the exit code. Raises SettingsError.

    0 when `serve` would start, 1 when it would not.
    """
    if wants_help(argv):
        print(DOCTOR_HELP, end="")
        return OK
    settings = load_settings([word for word in argv if word not in _OWN_FLAGS])
    report = _examine(settings, loads="--load" in argv)
    if "--json" in argv:
        json.dump(report.as_json(), sys.stdout, indent=1)
        print()
    else:
        from server.commands.doctor.view import show_report

        show_report(report, Console(highlight=False))
    return FAULT if report.all_problems else OK


def _examine(settings: Settings, *, loads: bool) -> Report:
    with _no_collections():
        report = _look(settings, loads=loads)
    if loads and not report.engine.problems:
        from engine import StartRefused

        try:
            report.loaded = asyncio.run(_load(settings))
        except StartRefused as refusal:
            report.problems.append(str(refusal))
    return report


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A quarter of the time to import the model libraries goes into looking for garbage that is not there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _look(settings: Settings, *, loads: bool) -> Report:
    from engine import diagnose, prepare_process
    from server.commands.doctor.report import make_report
    from server.observability.logs import configure_logging

    prepare_process()
    # What the loader logs is in the report; only what it does not expect is still said.
    configure_logging(settings.log.model_copy(update={"log_level": "info" if loads else "warning"}))
    return make_report(settings, diagnose(settings))


async def _load(settings: Settings) -> LoadFacts:
    """Start an engine, let it make a few tokens, and stop it. Raises StartRefused."""
    from engine import GenerationRequest, SamplingParams, SpeculationOptions, build_engine
    from server.commands.doctor.report import LoadFacts

    engine = build_engine(settings)
    began = time.monotonic()
    try:
        await engine.start()
        load_s = time.monotonic() - began
        if not engine.generates:  # an embedding model, which has no K/V
            return LoadFacts(load_s, 0, None)
        prompt = [0] * min(8, engine.info.max_model_len - 1)
        num_tokens = min(_NUM_TOKENS, engine.info.max_model_len - len(prompt))
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        speed = None
        if prompt:
            # Without drafts, which would guess such a text too well.
            plain = SpeculationOptions(enabled=False)
            request = GenerationRequest("doctor", prompt, sampling, speculation=plain)
            async for delta in engine.submit(request):
                if delta.finish is not None and delta.finish.timing.mean_itl_s:
                    speed = 1 / delta.finish.timing.mean_itl_s
        return LoadFacts(load_s, engine.info.num_kv_blocks, speed)
    finally:
        await engine.stop()
