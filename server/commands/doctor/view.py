"""The report for a person: one line a fact, what is wrong at the end."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.units import rough_size
from engine import CacheFacts, DeviceFacts, DraftFacts, EmbeddingFacts, ModelFacts
from server.commands.doctor.report import MachineFacts, Report, ServerFacts

Row = tuple[str, str]


def show_report(report: Report, console: Console) -> None:
    """Print it all."""
    for title, rows in _sections(report):
        console.print(Text(title, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=12, no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(f"  {name}"), Text(value))
        console.print(table)
    console.print()
    for warning in report.all_warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    problems = report.all_problems
    for problem in problems:
        console.print(Text(f"Problem: {problem}", style="red"))
    if problems:
        number = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        console.print(Text(f"serve would not start: {number} to solve first.", style="bold red"))
    elif report.loaded is not None:
        console.print(Text("serve would start: the model loads and works.", style="bold green"))
    else:
        console.print(
            Text("serve would start, as far as can be told without loading the model.", style="green")
        )


def _sections(report: Report) -> Iterator[tuple[str, list[Row]]]:
    engine = report.engine
    yield "machine", list(_machine(report.machine))
    if engine.device is not None:
        yield "device", list(_device(engine.device, engine.model))
    if engine.model is not None:
        yield "model", list(_model(engine.model))
    if engine.cache is not None and engine.model is not None:
        yield "memory", list(_memory(report, engine.model, engine.cache))
    if engine.drafts is not None:
        yield "drafts", list(_drafts(engine.drafts))
    if engine.embeddings is not None:
        yield "embeddings", list(_embeddings(engine.embeddings))
    yield "server", list(_server(report.server))
    if report.loaded is not None:
        loaded = report.loaded
        speed = (
            "no token" if loaded.tokens_per_s is None else f"{loaded.tokens_per_s:.1f} tokens/s, one request"
        )
        yield "loaded", [("time", f"{loaded.load_s:.1f} s"), ("speed", speed)]


def _machine(machine: MachineFacts) -> Iterator[Row]:
    cores = "1 core" if machine.num_cpus == 1 else f"{machine.num_cpus} cores"
    yield "cpu", f"{machine.cpu}, {cores} for this process"
    if machine.memory_bytes is not None and machine.available_bytes is not None:
        yield (
            "memory",
            f"{rough_size(machine.memory_bytes)}, {rough_size(machine.available_bytes)} available",
        )
    yield "system", machine.system
    yield "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())


def _device(device: DeviceFacts, model: ModelFacts | None) -> Iterator[Row]:
    yield "device", f"{device.device}{f' ({device.name})' if device.name else ''}: {device.why}"
    if device.memory_bytes is not None and device.free_bytes is not None:
        yield "memory", f"{rough_size(device.memory_bytes)}, {rough_size(device.free_bytes)} free"
    if model is not None and model.dtype is not None:
        yield "dtype", f"{model.dtype}: {model.dtype_why}"
    has = [name for name, there in device.features.items() if there]
    lacks = [name for name, there in device.features.items() if not there]
    yield "has", ", ".join(has) or "none of the instructions that make it fast"
    if lacks and has:
        yield "lacks", ", ".join(lacks)
    one_dnn = "with oneDNN" if device.one_dnn else "without oneDNN"
    yield "kernels", f"torch's for {device.capability}, {one_dnn}, {device.num_threads} threads"
    if len(device.thread_counts) > 1:
        yield "threads", f"a start tries {', '.join(map(str, device.thread_counts))}, and keeps the fastest"
    if model is not None and model.compiled is not None:
        yield "compiled", model.compiled
    if model is not None and model.quantized is not None:
        yield "weights", model.quantized


def _model(model: ModelFacts) -> Iterator[Row]:
    yield "name", model.name
    yield "source", model.how
    if model.directory is not None:
        yield "directory", model.directory
    if model.pending is not None:
        yield "at start", f"serve {model.pending}"
    if model.architecture is not None:
        parameters = "" if model.num_parameters is None else f", {_count(model.num_parameters)} parameters"
        yield "class", f"{model.architecture}{parameters}"
    if model.max_model_len is not None:
        yield "context", f"{model.max_model_len:,} tokens; vocabulary of {model.vocab_size:,}"
    if model.has_chat_template is not None:
        yield "chat", "has a template" if model.has_chat_template else "no template: give --chat-template"
    if model.default_sampling:
        named = ", ".join(f"{name} {value:g}" for name, value in model.default_sampling.items())
        yield "sampling", f"{named} where a request does not say"


def _embeddings(facts: EmbeddingFacts) -> Iterator[Row]:
    yield "name", facts.name
    if facts.directory is not None:
        yield "directory", facts.directory
    if facts.pending is not None:
        yield "at start", f"serve {facts.pending}"
    if facts.architecture is not None:
        gives = f"pooled by {' and '.join(facts.pooling)}" if facts.pooling else "scores pairs of texts"
        yield "class", f"{facts.architecture}, {gives}"
    if facts.max_model_len is not None:
        yield "context", f"{facts.max_model_len:,} tokens a text"
    if facts.weight_bytes is not None:
        yield "weights", rough_size(facts.weight_bytes)


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:,}"


def _origin(cache: CacheFacts, name: str) -> str:
    """Why a size is what it is, where the device made it."""
    origin = cache.size_origins.get(name, "")
    return f", {origin}" if origin.startswith("derived") else ""


def _memory(report: Report, model: ModelFacts, cache: CacheFacts) -> Iterator[Row]:
    yield "weights", rough_size(model.weight_bytes or 0)
    if model.scratch_bytes:
        yield "scratch", f"{rough_size(model.scratch_bytes)} at most, in which the kernels work"
    tokens = cache.num_kv_blocks * cache.kv_block_size
    yield (
        "K/V",
        f"{rough_size(cache.kv_bytes)} by {cache.source}: {cache.num_kv_blocks:,} blocks of "
        f"{cache.kv_block_size} tokens, {tokens:,} in all",
    )
    if cache.seats_bytes:
        yield "states", f"{rough_size(cache.seats_bytes)} for {cache.max_num_seqs} sequences"
    if cache.num_snapshots:
        kept = f"{rough_size(cache.snapshot_bytes)} for {cache.num_snapshots} states at the ends of blocks"
        yield "snapshots", f"{kept}, from which prompts that begin alike go on"
    full = "sequence" if cache.num_full_seqs == 1 else "sequences"
    yield (
        "room for",
        f"{cache.num_full_seqs} {full} of the full context at once; up to {cache.max_num_seqs} "
        f"shorter ones (--max-num-seqs{_origin(cache, 'max_num_seqs')})",
    )
    if cache.max_num_batched_tokens:
        origin = _origin(cache, "max_num_batched_tokens")
        yield "a step", f"up to {cache.max_num_batched_tokens:,} tokens (--max-num-batched-tokens{origin})"
    if cache.num_host_blocks:
        yield "swap", f"{rough_size(cache.host_bytes)} of host memory for preempted requests, taken as needed"
    else:
        yield "swap", "none: a preempted request is computed anew"
    needed = report.engine.needed_bytes
    if needed is not None:
        work = report.engine.work_bytes
        beside = f"about {rough_size(work)} to compute in and for recorded steps" if work else "work space"
        yield "together", f"{rough_size(needed)}, and {beside}"


def _drafts(drafts: DraftFacts) -> Iterator[Row]:
    yield "by", ", ".join(drafts.methods) or "nobody: no speculation"
    if drafts.reader_bytes is not None:
        kv = f", {rough_size(drafts.reader_kv_bytes)} of K/V" if drafts.reader_kv_bytes else ""
        held = f", {rough_size(drafts.reader_held_bytes)} of features" if drafts.reader_held_bytes else ""
        yield drafts.methods[-1], f"{rough_size(drafts.reader_bytes)} of weights{kv}{held}"
    if drafts.model_how is not None:
        weights = "" if drafts.model_bytes is None else f", {rough_size(drafts.model_bytes)} of weights"
        kv = "" if drafts.model_kv_bytes is None else f", {rough_size(drafts.model_kv_bytes)} of K/V"
        place = ", on the CPU" if drafts.is_on_host else ""
        yield "model", f"{drafts.model_how}{weights}{kv}{place}"


def _server(server: ServerFacts) -> Iterator[Row]:
    if server.url is not None:
        yield "address", f"{server.url}: free"
    elif server.port == 0:
        yield "address", f"{server.host}, any free port"
    else:
        yield "address", f"{server.host}, port {server.port}: cannot be used"
    yield "keys", str(server.num_keys) if server.num_keys else "none: whoever can connect may ask"
