"""The whole engine against transformers' continuous batching with its CUDA graphs."""

from __future__ import annotations

from dataclasses import fields
from time import perf_counter
from typing import Any

import torch
import uvloop
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import is_flash_attn_2_available

from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import burst, made_engine, random_prompts, settings_for
from tests.bench.report import Bar, Section
from tests.bench.streams import BurstFigures
from tests.bench.transformers_worker import record_of

BAR = 2.0
RUNS = 2
_PAGE_TOKENS = 256  # its own default
_MAX_BATCH_TOKENS = 4096
_PATIENCE_S = 6.0  # most of it goes into its graphs, which it records anew each time


def run_peer(bench: Bench) -> Section:
    """The smaller model, bursts of prompts with as many tokens as are then generated."""
    sizes, shape = bench.sizes, bench.sizes.small
    tokens = sizes.peer_tokens
    section = Section("transformers", f"{shape.name}, {tokens} tokens after {tokens}, {sizes.dtype}")
    section.notes.append(
        "Both from the first request to the last token; transformers' own times, without setting up "
        "and warming up its manager. The best of a few runs of each."
    )
    has_flash = "is" if is_flash_attn_2_available() else "is not"
    section.notes.append(f"flash_attn, with which transformers is faster, {has_flash} installed.")
    prompts = {batch: random_prompts(shape.vocab, batch, tokens, batch) for batch in sizes.peer_batches}
    ours = uvloop.run(_ours(bench, prompts))
    for batch, rate in ours.items():
        section.add(f"batch {batch}", "engine", "tokens/s", [rate])
    bench.keep(section)
    bench.say(f"making the {shape.name} for transformers")
    peer = _Peer(bench)
    for batch in sizes.peer_batches:
        bench.say(f"transformers, batch {batch}")
        theirs = peer.rate(prompts[batch], tokens)
        name = f"batch {batch}"
        section.add(name, "transformers", "tokens/s", [theirs])
        ratio = section.add(name, "engine / transformers", "x", [ours[batch] / theirs])
        section.bars.append(Bar(f"engine / transformers, {name}", BAR, "x", ratio.median, at_least=True))
        bench.keep(section)
    return section


async def _ours(bench: Bench, prompts: dict[int, list[list[int]]]) -> dict[int, float]:
    """Output tokens a second, by batch."""
    sizes, shape = bench.sizes, bench.sizes.small
    max_tokens = 2 * sizes.peer_tokens
    loaded = bench.model(shape, max_tokens)
    settings = settings_for(max(prompts), max_tokens)
    rates: dict[int, float] = {}
    async with made_engine(settings, loaded, bench.tokenizer(shape)) as made:
        for batch, given in prompts.items():
            bench.say(f"ours, batch {batch}")
            for _ in range(RUNS):
                records = await burst(made.engine, given, sizes.peer_tokens)
                rate = BurstFigures.of(records).output_tokens_per_s
                rates[batch] = max(rate, rates.get(batch, 0.0))
    return rates


class _Peer:
    """The peer with random weights of the same shape, and its own choice of attention."""

    def __init__(self, bench: Bench) -> None:
        torch.manual_seed(0)
        with torch.device(bench.device):
            self._model: Any = AutoModelForCausalLM.from_config(
                bench.sizes.small.config(), dtype=bench.sizes.dtype, attn_implementation="sdpa"
            )
        self._model.eval().requires_grad_(False)
        self._has_graphs = bench.device.type == "cuda"

    def rate(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Output tokens a second of a burst."""
        blocks = sum(-(-(len(prompt) + max_tokens) // _PAGE_TOKENS) + 1 for prompt in prompts)
        wanted = {
            "page_size": _PAGE_TOKENS,
            "num_blocks": blocks + blocks // 4 + 4,  # it stops admitting when 15 % or less are free
            "max_batch_tokens": max(_MAX_BATCH_TOKENS, len(prompts)),
            "max_requests_per_batch": len(prompts),
            "allow_block_sharing": False,
            "use_cuda_graph": self._has_graphs,
        }
        known = {field.name for field in fields(ContinuousBatchingConfig)}  # not all versions have all
        batching = ContinuousBatchingConfig(**{name: wanted[name] for name in wanted.keys() & known})
        generation = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1)
        rate = 0.0
        began = perf_counter()
        while not rate or (self._has_graphs and perf_counter() - began < _PATIENCE_S):
            outputs = self._model.generate_batch(
                inputs=prompts,
                generation_config=generation,
                continuous_batching_config=batching,
                record_timestamps=True,
            )
            records = [record_of(output, max_tokens) for output in outputs.values()]
            rate = max(rate, BurstFigures.of(records).output_tokens_per_s)
        return rate
