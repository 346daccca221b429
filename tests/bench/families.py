"""One decode of each family whose layers the kernels compute in one call, against the same without kernels.

Random models of real widths with four layers and 32,768 tokens, but for Gemma 3 270M, which is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from engine.compute.native.decoder import NativeDecoder
from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.kernels import CONTEXT_TOKENS, PASS_S, load_runner
from tests.bench.report import Bar, Section
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

BAR = 2.0
_COMMON: dict[str, Any] = {
    "vocab_size": 32_768,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of a model: hidden, of the gate, of a head; how many heads, and K/V heads."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    def options(self) -> dict[str, Any]:
        """As configurations call them."""
        return _COMMON | {
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


_1B = Shape(2048, 8192, 32, 8, 64).options()
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama 1B": lambda: LlamaConfig(**_1B),
    "gemma3 270M": lambda: Gemma3TextConfig(
        **Shape(640, 2048, 4, 1, 256).options() | {"num_hidden_layers": 18, "vocab_size": 262_144},
        sliding_window=512,
    ),
    "gemma3 1B": lambda: Gemma3TextConfig(**Shape(1152, 6912, 4, 1, 256).options(), sliding_window=512),
    "gemma2 2B": lambda: Gemma2Config(**Shape(2304, 9216, 8, 4, 256).options()),
    "granite 2B": lambda: GraniteConfig(**_1B, residual_multiplier=0.22, embedding_multiplier=12.0),
    "phi3 mini": lambda: Phi3Config(**Shape(3072, 8192, 24, 8, 128).options(), partial_rotary_factor=0.75),
    "smollm3 3B": lambda: SmolLM3Config(**Shape(2048, 11_008, 16, 4, 128).options()),
    "olmo2 1B": lambda: Olmo2Config(**Shape(2048, 8192, 16, 16, 128).options()),
    "olmo3 1B": lambda: Olmo3Config(**Shape(2048, 8192, 16, 16, 128).options()),
    "ministral 1B": lambda: MinistralConfig(**_1B, sliding_window=4096),
    "seed-oss 1B": lambda: SeedOssConfig(**_1B),
    "exaone4 1.2B": lambda: Exaone4Config(**Shape(2048, 4096, 32, 8, 64).options()),
    "glm4 1B": lambda: Glm4Config(**_1B, partial_rotary_factor=0.5),
    "cohere2 1B": lambda: Cohere2Config(**_1B),
    "gemma4 E2B": lambda: Gemma4TextConfig(
        **Shape(1536, 6144, 8, 1, 256).options(),
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=32_768,
    ),
    "gpt-oss of 8 experts": lambda: GptOssConfig(
        **Shape(1024, 1024, 16, 4, 64).options(), num_local_experts=8, sliding_window=128
    ),
    "mixtral of 8 experts": lambda: MixtralConfig(
        **Shape(1024, 2048, 16, 4, 64).options(), sliding_window=None
    ),
    "olmoe of 16 experts": lambda: OlmoeConfig(
        **Shape(1024, 1024, 16, 16, 64).options(), num_experts=16, num_experts_per_tok=8
    ),
    "qwen2-moe of 16 experts": lambda: Qwen2MoeConfig(
        **Shape(1024, 2816, 16, 4, 64).options(),
        num_experts=16,
        moe_intermediate_size=704,
        shared_expert_intermediate_size=2816,
    ),
    "qwen3-moe of 16 experts": lambda: Qwen3MoeConfig(
        **Shape(1024, 3072, 16, 4, 64).options(),
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    ),
    "starcoder2 3B": lambda: Starcoder2Config(**Shape(3072, 12_288, 24, 2, 128).options()),
}


def save_random(config: PreTrainedConfig, directory: Path) -> None:
    """A model of this shape in bfloat16, and a tokenizer for it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


def add_family(context: BenchContext, section: Section, name: str) -> None:
    """Milliseconds of a bare pass of one token with kernels and without, by turns."""
    bare = {}
    for side in ("off", "on"):
        runner = load_runner(context, side)
        if side == "on" and not isinstance(runner.forward.loaded.model.base_model, NativeDecoder):
            section.notes.append(f"{name}: layers are computed one by one.")
        ids = range(3, VOCAB_SIZE)
        bare[side] = BareModel(runner, ids, 1, CONTEXT_TOKENS - 1, CONTEXT_TOKENS, real_kv=False)
    steps = {side: max(3, int(PASS_S / one.step_s(2))) for side, one in bare.items()}
    runs: dict[str, list[float]] = {side: [] for side in bare}
    for _ in range(context.runs):
        for side, one in bare.items():
            runs[side].append(1e3 * one.step_s(steps[side]))
    for side, times in runs.items():
        section.add(name, f"compile {side}", "ms", times)
    pairs = zip(runs["off"], runs["on"], strict=True)
    ratio = section.add(name, "off / on", "x", [off / on for off, on in pairs])
    section.bars.append(Bar(f"{name}: kernels over none", BAR, "x", ratio.median, at_least=True))


def measure(context: BenchContext) -> Section:
    """All of them, one after the other."""
    section = Section("families", f"a bare pass of one token at context {CONTEXT_TOKENS}")
    for name, config in CONFIGS.items():
        context.say(f"families, {name}")
        with TemporaryDirectory() as directory:
            save_random(config(), Path(directory))
            flags = ("--model", directory, "--dtype", "bfloat16")
            add_family(replace(context, flags=flags), section, name)
    return section


def run_families(context: BenchContext) -> list[Section]:
    """The section of the benchmark; everything on one thread, like the engine's target thread."""
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(measure, context).result()]
