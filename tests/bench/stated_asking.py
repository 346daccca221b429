"""One stream of 32 that asks for more, on a device of stated times: what the others lose by it over HTTP.

It is drawn by top-p from what a schema allows, and reports log-probabilities. The device takes no longer for
that. What the host queues for it is computed here, over a vocabulary so small that it takes about as long as
queueing does.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.context import BenchContext
from tests.bench.crowd import DEVICES, Device, StatedServer, burst, save_model
from tests.bench.gpu.made_models import save_tokenizer
from tests.bench.processes import JsonWorker
from tests.bench.report import Bar, Section
from tests.bench.stated_server import StatedModels
from tests.bench.streams import decode_rate, percentile

BATCH = 32
VOCAB_SIZE = 2048
BAR = 0.9  # of the tokens a second without
# The likeliest token of such a model is a word, which may go on for ever where a string has begun.
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
ALL = {"temperature": 1, "top_p": 0.95, "logprobs": 5, "structured_outputs": {"json": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "top-p": {"temperature": 1, "top_p": 0.95},
    "log-probabilities": {"logprobs": 5},
    "a schema": {"structured_outputs": {"json": SCHEMA}},
    "all three": ALL,
}


def run_stated_asking(context: BenchContext) -> list[Section]:
    """The section `stated-asking` with its bar."""
    section = Section("stated-asking", f"one stream of {BATCH} that asks for more, a device of stated times")
    with TemporaryDirectory(prefix="slipstream-asking-") as name:
        save_model(Path(name), VOCAB_SIZE)
        save_tokenizer(Path(name), VOCAB_SIZE, spells=True)
        for device in DEVICES:
            _measure(context, section, Path(name), device)
    return [section]


def _measure(context: BenchContext, section: Section, model: Path, device: Device) -> None:
    with ExitStack() as stack:
        stated = StatedModels((device.step_ms / 1e3, device.sequence_us / 1e6))
        server = stack.enter_context(StatedServer(stated, model, BATCH, "--speculative-method", "none"))
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        server.wait_ready()
        context.say(f"stated-asking, {device.name}")
        _rate(server, client, ALL)  # not counted
        turns = []
        for _ in range(context.runs):
            plain = _rate(server, client, {})
            turns.append((plain, {name: _rate(server, client, more) for name, more in ASKED.items()}))
    section.add(device.name, "plain, a stream", "tokens/s", [plain for plain, _ in turns])
    for name in ASKED:
        ratio = section.add(
            device.name, f"{name} / plain", "x", [with_one[name] / plain for plain, with_one in turns]
        )
    section.bars.append(Bar(f"{device.name}: all three / plain", BAR, "x", ratio.median, at_least=True))


def _rate(server: StatedServer, client: JsonWorker, more: dict[str, Any]) -> float:
    """Tokens a second of the middle stream of those that ask for nothing; one asks for `more`."""
    records = burst(server, client, BATCH, more)
    return percentile([decode_rate(record) for record in records[1:]], 50)
