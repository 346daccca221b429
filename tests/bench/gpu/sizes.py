"""What is measured: the shapes of the models, and how large the batches and contexts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3_5TextConfig

MAX_POSITIONS = 131_072


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama by its sizes. `rope_factor` stretches its rotary embedding for long contexts, None does not."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    rope_factor: float | None = None

    def config(self, *, tied: bool | None = None) -> LlamaConfig:
        """Its configuration; `tied` None leaves its embeddings as they are meant."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500_000.0}
        if self.rope_factor is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied if tied is None else tied,
            rope_parameters=rope,
            rms_norm_eps=1e-5,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=0,
            eos_token_id=1,
        )

    @property
    def attention_operations(self) -> float:
        """Floating-point operations of all layers for one pair of a token and a key that it sees."""
        return 4.0 * self.layers * self.hidden


@dataclass(frozen=True, slots=True)
class HybridShape:
    """A dense Qwen3.5 by its sizes: of each four layers the last attends, the others carry a state.

    `state_dim` is the width of a head's keys and values in a state, of which there are twice as many values.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    state_heads: int
    state_dim: int
    vocab: int

    def config(self) -> Qwen3_5TextConfig:
        """Its configuration."""
        return Qwen3_5TextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=self.state_heads,
            linear_num_value_heads=2 * self.state_heads,
            linear_key_head_dim=self.state_dim,
            linear_value_head_dim=self.state_dim,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=0,
            eos_token_id=1,
        )


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A mixture by its sizes: `count` experts, each of [2 * width, hidden] and back; a row chooses `each`."""

    name: str
    hidden: int
    width: int
    count: int
    each: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. Batches and contexts are of the sections that have their names."""

    large: LlamaShape
    small: LlamaShape
    dtype: torch.dtype
    repeats: int  # of what is timed as one
    copy_bytes: int
    product: int
    steps: int
    decode_context: int
    decode_batches: tuple[int, ...]
    mixed_decodes: int  # beside which a prompt is read
    prefill_tokens: int
    peer_batches: tuple[int, ...]
    peer_tokens: int  # of a prompt, and of an output
    draft_batches: tuple[int, ...]
    draft_tokens: int
    idle_batches: tuple[int, ...]
    guided_batch: int
    curve_batches: tuple[int, ...]
    curve_contexts: tuple[int, ...]
    mixture: MixtureShape
    hybrid: HybridShape


FULL = Sizes(
    large=LlamaShape("8B", 4096, 14336, 32, 32, 8, 128_256, tied=False, rope_factor=8.0),
    small=LlamaShape("1B", 2048, 8192, 16, 32, 8, 128_256, tied=True, rope_factor=32.0),
    dtype=torch.bfloat16,
    repeats=10,
    copy_bytes=1 << 31,
    product=8192,
    steps=64,
    decode_context=1024,
    decode_batches=(1, 32, 128),
    mixed_decodes=64,
    prefill_tokens=4096,
    peer_batches=(1, 32, 128),
    peer_tokens=128,
    draft_batches=(1, 4, 16, 64),
    draft_tokens=192,
    idle_batches=(8, 32, 128),
    guided_batch=32,
    curve_batches=(1, 4, 16, 64, 256),
    curve_contexts=(128, 1024, 8192),
    mixture=MixtureShape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    hybrid=HybridShape("4B hybrid", 2560, 9216, 32, 16, 4, 256, 16, 128, 151_936),
)

# To try the benchmark itself, on any device: its figures mean nothing.
SMALL = Sizes(
    large=LlamaShape("larger", 64, 128, 2, 4, 2, 512, tied=False),
    small=LlamaShape("smaller", 32, 64, 1, 4, 2, 512, tied=True),
    dtype=torch.float32,
    repeats=1,
    copy_bytes=1 << 16,
    product=64,
    steps=4,
    decode_context=64,
    decode_batches=(1, 2),
    mixed_decodes=2,
    prefill_tokens=64,
    peer_batches=(1, 2),
    peer_tokens=8,
    draft_batches=(1, 2),
    draft_tokens=16,
    idle_batches=(2,),
    guided_batch=2,
    curve_batches=(1, 2),
    curve_contexts=(32,),
    mixture=MixtureShape("tiny", 64, 32, 6, 3),
    hybrid=HybridShape("tiny hybrid", 64, 128, 4, 4, 2, 16, 2, 16, 512),
)
