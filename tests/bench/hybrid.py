"""A model with recurrent state, a random Qwen3.5 of a hundred million weights: drafts, and shared prompts.

Its weights are drawn so that what follows a token hangs mostly on that token, and greedy text runs into a
loop, as the text does that drafts are for. The figure is what drafts save less what taking states back costs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvloop
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from config import load_settings
from tests.bench.context import BenchContext
from tests.bench.decode import loaded_engine
from tests.bench.report import Section
from tests.bench.shared_prefix import NUM_REQUESTS, PrefixCase, prefix_cases, prefix_section
from tests.bench.speculation import Case, section_of
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

BAR = 1.5
MAX_TOKENS = 192
PROMPT = (5, 9, 17, 33, 7, 40, 41)
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


def save_looping_hybrid(directory: Path) -> None:
    """The model, and a tokenizer for it."""
    torch.manual_seed(0)
    types = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3_5TextConfig(**SHAPE, layer_types=types * 4, initializer_range=0.05)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weight.data *= 0.1
        elif name.endswith("embed_tokens.weight"):
            weight.data *= 30
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


async def measure(context: BenchContext) -> tuple[list[Case], list[PrefixCase]]:
    """One stream and eight, greedy; then prompts that begin alike."""
    cases = [
        Case(
            name=f"looping text, batch {batch}",
            prompts=[[*PROMPT, 50 + i] for i in range(batch)],
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            bar=BAR,
            num_streams=batch,
        )
        for batch in (1, 8)
    ]
    prefixes = prefix_cases()
    async with loaded_engine(context) as loaded:
        for run in range(-1, context.runs):  # the first is not counted: costs and rates are learnt
            for case in cases:
                context.say(f"hybrid, {case.name}, run {run + 1}/{context.runs}")
                await case.run(loaded.engine, run + 1)
            for prefix in prefixes:
                context.say(f"hybrid, shared prefix, {prefix.name}, run {run + 1}/{context.runs}")
                await prefix.run(loaded.engine, run + 1)
    for case in cases:
        del case.on[0], case.off[0]
    for prefix in prefixes:
        del prefix.cold[0], prefix.warm[0]
    return cases, prefixes


def run_hybrid(context: BenchContext) -> list[Section]:
    """The sections of the benchmark `hybrid`, with a bar for each case."""
    with TemporaryDirectory() as directory:
        save_looping_hybrid(Path(directory))
        flags = ["--model", directory, "--dtype", "float32", "--max-model-len", "1024"]
        flags += ["--max-num-seqs", str(NUM_REQUESTS)]
        cases, prefixes = uvloop.run(measure(replace(context, settings=load_settings(flags))))
    note = "A random model in float32: a verified row is computed in another shape than a decode."
    drafts = section_of("hybrid", "drafts on a model with recurrent state, against none", cases, note)
    return [drafts, prefix_section(prefixes)]
