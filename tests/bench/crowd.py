"""Streams over HTTP of a device that is quicker than the host: how much of its output reaches the clients."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tests.bench.context import BenchContext
from tests.bench.load import HTTP_TIMEOUT_S
from tests.bench.processes import HttpChild, JsonWorker, free_port
from tests.bench.report import Section
from tests.bench.stated_server import StatedModels
from tests.bench.streams import BenchmarkFailed, BurstFigures, StreamRecord

BATCHES = (1, 8, 32, 64, 128, 256)
MAX_TOKENS = 400


class Device(NamedTuple):
    """What its steps last."""

    name: str
    step_ms: float
    sequence_us: float

    def step_of(self, batch: int) -> float:
        """Milliseconds."""
        return self.step_ms + batch * self.sequence_us / 1e3


# About what an H200's copy rate allows for bfloat16 weights and a context of 256 tokens.
DEVICES = (Device("a 1B model", 0.6, 6.0), Device("an 8B model", 4.0, 25.0))


class StatedServer(HttpChild):
    """`tests.bench.stated_server` for these models."""

    def __init__(self, stated: StatedModels, model: Path, max_num_seqs: int, *flags: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "tests.bench.stated_server", stated.to_json()]
        command += ["--host", self.host, "--port", str(port), "--log-level", "warning", "--model", str(model)]
        command += ["--max-num-seqs", str(max_num_seqs), "--kv-cache-memory", "1GiB", "--compile", "off"]
        super().__init__([*command, *flags], port, "/health/ready")


def save_model_like(other: Path, directory: Path) -> None:
    """A model of one small layer with the tokenizer, and so the vocabulary, of another."""
    save_model(directory, AutoConfig.from_pretrained(other).vocab_size)
    for file in other.glob("*token*"):
        shutil.copy(file, directory)


def save_model(directory: Path, vocab_size: int) -> None:
    """A model of one small layer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)


def burst(
    server: StatedServer, client: JsonWorker, batch: int, more: Mapping[str, Any] | None = None
) -> list[StreamRecord]:
    """So many streams at once, of MAX_TOKENS each, of which the first asks for `more`."""
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [{**body, "prompt": f"Stream {number} says"} for number in range(batch)]
    bodies[0] |= more or {}
    question = {"host": server.host, "port": server.port, "bodies": bodies, "timeout_s": HTTP_TIMEOUT_S}
    answer = client.ask(question, HTTP_TIMEOUT_S + 10)
    records = [StreamRecord.from_json(record) for record in answer["records"]]
    if any(record.num_output_tokens != MAX_TOKENS for record in records):
        raise BenchmarkFailed("a stream ended early")
    return records


def run_crowd(context: BenchContext) -> list[Section]:
    """The section `crowd`."""
    section = Section("crowd", "streams over HTTP from a device whose steps last a stated time")
    with TemporaryDirectory(prefix="slipstream-crowd-") as directory:
        save_model_like(context.model_directory, Path(directory))
        for device in DEVICES:
            _measure(context, section, Path(directory), device)
    return [section]


def _measure(context: BenchContext, section: Section, model: Path, device: Device) -> None:
    with ExitStack() as stack:
        stated = StatedModels((device.step_ms / 1e3, device.sequence_us / 1e6))
        server = StatedServer(stated, model, max(BATCHES), "--speculative-method", "none")
        stack.enter_context(server)
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        server.wait_ready()
        for batch in BATCHES:
            context.say(f"crowd, {device.name}, {batch} streams")
            burst(server, client, batch)  # not counted
            runs = [BurstFigures.of(burst(server, client, batch)) for _ in range(context.runs)]
            name = f"{device.name}, {batch} stream{'s' if batch > 1 else ''}"
            section.add(name, "a step", "ms", [device.step_of(batch)])
            section.add(name, "delivered", "tokens/s", [run.output_tokens_per_s for run in runs])
            section.add(name, "a stream", "tokens/s", [run.decode_tokens_per_s for run in runs])
            section.add(name, "a stream, of the device's", "%", [_share(device, batch, run) for run in runs])
            section.add(name, "per event", "tokens", [run.tokens_per_event for run in runs])
            section.add(name, "between events p50", "ms", [run.itl_p50_ms for run in runs])
            section.add(name, "p99", "ms", [run.itl_p99_ms for run in runs])


def _share(device: Device, batch: int, run: BurstFigures) -> float:
    return 100 * run.decode_tokens_per_s * device.step_of(batch) / 1e3
