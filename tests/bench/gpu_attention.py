"""CUDA attention alone: `python -m tests.bench.gpu_attention [--json FILE]`, in less than two minutes.

Decode: the bytes of keys and values that must be read, over the time; beside it what a plain copy reaches.
Prefill: the arithmetic of causal attention over the time; beside it a large product, and torch's own causal
attention over keys that lie densely. Kept: decodes and a chunk over K/V of 8 bits, beside bfloat16. The
shape is a layer of Llama 3 8B in bfloat16. Latent: the rows that a layer of GLM-4.7-Flash stores of a token,
beside the keys and values of all heads that they stand for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from engine.compute.attention import LayerCall
from engine.compute.attention.kv_tensors import KvTensors, bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.cuda.triton_attention import Gpu, TritonAttention, TritonStep
from tests.bench.gpu import device_rates
from tests.bench.machine import about
from tests.bench.report import Section, report_json
from tests.support.attention_noise import Chunk, scattered_step

LAYER = LayerKv(8, 128, 128)
HEADS = 32
LATENT = {"latent rows": LayerKv(1, 576, 512, value_in_key=True), "all heads": LayerKv(20, 256, 256)}
LATENT_HEADS = 20
LATENT_STEPS = [(1, 8192, 1), (32, 1024, 1), (32, 8192, 1), (32, 8192, 5), (1, 4096, 4096), (1, 8192, 512)]
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
DECODES = [(batch, context) for context in (1024, 8192) for batch in (1, 32, 128)]
VERIFIED_TOKENS = 5
PREFILLS = [(0, 4096), (8192, 512)]  # (context, tokens)
KEPT = {"bfloat16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}  # what K/V is kept in
KEPT_CONTEXT = 8192
KEPT_STEPS = [(1, 1), (32, 1), (1, 2048)]  # (sequences, tokens of each)
RUNS = 5
REPEATS = 10
# The layers of a case are read one after another, and together hold this much: no cache keeps them.
COLD_BYTES = 1 << 30
MOST_LAYERS = 64


class Case:
    """A step over as many layers as outgrow every cache, recorded as one CUDA graph."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: torch.device,
        kept: torch.dtype | None = None,
        layer: LayerKv = LAYER,
        heads: int = HEADS,
    ) -> None:
        inputs, num_blocks = scattered_step(chunks, BLOCK_SIZE)
        self.num_tokens = len(inputs.token_ids)
        self.bytes = int(inputs.kv_lens.sum()) * bytes_per_block((layer,), 1, kept or DTYPE)
        self.num_layers = min(MOST_LAYERS, max(2, -(-COLD_BYTES // self.bytes)))
        kv = KvTensors([layer] * self.num_layers, num_blocks, BLOCK_SIZE, DTYPE, device, kept)
        _fill_alike(kv)
        self._query = torch.randn(self.num_tokens, heads, layer.key_dim, dtype=DTYPE, device=device)
        self._step: TritonStep = TritonAttention(Gpu.of(device)).plan(inputs, kv)
        self.attend_all()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.attend_all()

    def attend_all(self) -> None:
        """One call a layer."""
        for layer in range(self.num_layers):
            self._step.attend(self._query, LayerCall(layer, self._query.shape[2] ** -0.5))


def _fill_alike(kv: KvTensors) -> None:
    """Put noise into every slot, the same in every layer."""
    slots = torch.arange(kv.num_blocks * BLOCK_SIZE, device=kv.device)
    layer = kv.layers[0]
    shape = (len(slots), layer.num_kv_heads)
    key, value = (
        torch.randn(*shape, dim, dtype=DTYPE, device=kv.device) for dim in (layer.key_dim, layer.value_dim)
    )
    kv.write(0, kv.rows_of(slots, layer.num_kv_heads), key, value)
    for pages in (kv.keys, kv.values):
        for tensor in pages[1:]:
            tensor.copy_(pages[0])


def seconds_of(work: Callable[[], object]) -> list[float]:
    """What one call of `work` takes on the current device, by its own clock, in several runs."""
    return device_rates.seconds_of(work, torch.device("cuda", torch.cuda.current_device()), REPEATS)


def launch_seconds(case: Case) -> list[float]:
    """What one layer's call costs the host when nothing is recorded."""
    runs = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        case.attend_all()
        runs.append((time.perf_counter() - started) / case.num_layers)
    torch.cuda.synchronize()
    return runs


def run_decode(device: torch.device) -> Section:
    """Bytes a second of decodes, and of verification, beside those of a copy."""
    section = Section("decode", f"{HEADS} heads on {LAYER.num_kv_heads} of {LAYER.key_dim}, {DTYPE}")
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = [2 * source.numel() / seconds / 1e9 for seconds in seconds_of(lambda: target.copy_(source))]
    peak = section.add("a plain copy", "moved", "GB/s", copied).median or 0.0
    cases = [(f"batch {batch}, context {context}", batch, context, 1) for batch, context in DECODES]
    cases.append((f"batch 32, context 1024, {VERIFIED_TOKENS} tokens each", 32, 1024, VERIFIED_TOKENS))
    for name, batch, context, tokens in cases:
        case = Case([Chunk(context - tokens, tokens)] * batch, device)
        seconds = [all_layers / case.num_layers for all_layers in seconds_of(case.graph.replay)]
        section.add(name, "layer", "µs", [1e6 * one for one in seconds])
        section.add(name, "moved", "GB/s", [case.bytes / one / 1e9 for one in seconds])
        section.add(name, "of a copy", "%", [case.bytes / one / 1e7 / peak for one in seconds])
        section.add(name, "launch", "µs", [1e6 * one for one in launch_seconds(case)])
        del case
        torch.cuda.empty_cache()
    section.notes.append("Layer: from a CUDA graph of cold layers. Launch: the host's time without a graph.")
    return section


def run_prefill(device: torch.device) -> Section:
    """Operations a second of prompts, beside those of a large product."""
    section = Section("prefill", f"{HEADS} heads on {LAYER.num_kv_heads} of {LAYER.key_dim}, {DTYPE}")
    size = 8192
    left, right = (torch.randn(size, size, dtype=DTYPE, device=device) for _ in range(2))
    products = [2 * size**3 / seconds / 1e12 for seconds in seconds_of(lambda: left @ right)]
    peak = section.add(f"product of {size}", "rate", "TFLOP/s", products).median or 0.0
    for context, tokens in PREFILLS:
        case = Case([Chunk(context, tokens)], device)
        pairs = tokens * context + tokens * (tokens + 1) / 2
        operations = 2 * pairs * HEADS * (LAYER.key_dim + LAYER.value_dim)
        seconds = [all_layers / case.num_layers for all_layers in seconds_of(case.graph.replay)]
        name = f"{tokens} tokens after {context}"
        section.add(name, "rate", "TFLOP/s", [operations / one / 1e12 for one in seconds])
        section.add(name, "of a product", "%", [operations / one / 1e10 / peak for one in seconds])
        if not context:
            dense = seconds_of(dense_attention(tokens, device))
            section.add(f"{name}, torch's", "rate", "TFLOP/s", [operations / one / 1e12 for one in dense])
        del case
        torch.cuda.empty_cache()
    section.notes.append("Operations: two for each (token, visible key) and number of a key or a value.")
    return section


def run_kept(device: torch.device) -> Section:
    """What K/V of 8 bits saves of a layer of attention, beside bfloat16 in the same run."""
    section = Section("kept", f"{KEPT_CONTEXT:,} tokens of context, K/V in 16 and in 8 bits")
    for sequences, tokens in KEPT_STEPS:
        plain = 0.0
        for name, kept in KEPT.items():
            case = Case([Chunk(KEPT_CONTEXT - tokens, tokens)] * sequences, device, kept)
            runs = [1e6 * one / case.num_layers for one in seconds_of(case.graph.replay)]
            row = f"{sequences} x {tokens}, {name}"
            median = section.add(row, "layer", "µs", runs).median or 0.0
            plain = median if kept is None else plain
            section.add(row, "of bfloat16", "%", [100 * one / plain for one in runs])
            del case
            torch.cuda.empty_cache()
    section.notes.append("Sequences x tokens of each. Layer: as in decode; K/V is written beforehand.")
    return section


def run_latent(device: torch.device) -> Section:
    """What a step over latent rows takes, beside one over the keys and values of all heads."""
    section = Section("latent", f"{LATENT_HEADS} heads, {DTYPE}")
    for sequences, stop, tokens in LATENT_STEPS:
        medians = []
        for name, layer in LATENT.items():
            case = Case([Chunk(stop - tokens, tokens)] * sequences, device, None, layer, LATENT_HEADS)
            runs = [1e6 * one / case.num_layers for one in seconds_of(case.graph.replay)]
            row = f"{sequences} x {tokens} up to {stop:,}"
            medians.append(section.add(row, name, "µs", runs).median or 0.0)
            del case
            torch.cuda.empty_cache()
        section.add(row, "latent / all", "", [medians[0] / medians[1]])
    section.notes.append("Sequences x tokens of each. What latent rows need before and behind is not in it.")
    return section


def dense_attention(tokens: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Torch's causal attention in the same shape."""
    shapes = [
        (HEADS, LAYER.key_dim),
        (LAYER.num_kv_heads, LAYER.key_dim),
        (LAYER.num_kv_heads, LAYER.value_dim),
    ]
    query, key, value = (
        torch.randn(1, heads, tokens, dim, dtype=DTYPE, device=device) for heads, dim in shapes
    )
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep; 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu_attention", description="CUDA attention."
    )
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This needs a CUDA device.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    console, facts = Console(width=120), about()
    console.print_json(json.dumps(facts))
    sections = [run_decode(device), run_prefill(device), run_kept(device), run_latent(device)]
    for section in sections:
        section.show(console)
    if arguments.json is not None:
        report = report_json(facts, sections)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
