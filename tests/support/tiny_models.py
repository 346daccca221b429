"""Tiny random Hugging Face models, made in the test: no network, no files but those the caller asks for.

One configuration a family, small enough for a forward pass in a millisecond, yet with the family's own traits
switched on (windows shorter than a prompt, soft caps, two rope bases, grouped heads, experts, multipliers).
Weights are large and every bias and norm is random, so that a wrongly attended position shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BambaConfig,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    DiffLlamaConfig,
    DogeConfig,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HrmTextConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    Mamba2Config,
    MambaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OpenAIGPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RwkvConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
    XGLMConfig,
)

from engine.compute.attention.own_attention import built_with

VOCAB_SIZE = 512
MAX_POSITIONS = 256
WINDOW = 8
BOS_TOKEN, START_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BOS_ID, START_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": BOS_ID,
}
_GROUPED: dict[str, Any] = _COMMON | {"num_key_value_heads": 2}
_GROUPED_16: dict[str, Any] = _GROUPED | {"head_dim": 16}
_SCALED: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
_DUAL_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    # The first layer sees everything, the second only its window.
    "qwen2_window": lambda: Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_GROUPED_16),
    "mistral": lambda: MistralConfig(**_GROUPED_16, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_GROUPED_16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        rope_parameters=_DUAL_ROPE,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: Phi3Config(**_GROUPED, partial_rotary_factor=0.5, sliding_window=WINDOW),
    "gpt2": lambda: GPT2Config(**_COMMON),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON),
    "olmo2": lambda: Olmo2Config(**_GROUPED),
    "mixtral": lambda: MixtralConfig(**_GROUPED_16, num_local_experts=4, num_experts_per_tok=2),
    "granite": lambda: GraniteConfig(**_GROUPED, **_SCALED),
}

_EVERY_OTHER: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# More that attend in all layers, each in a way that the compiled kernels know apart.
_FURTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    "cohere2": lambda: Cohere2Config(**_GROUPED_16, **_EVERY_OTHER),
    "exaone4": lambda: Exaone4Config(**_GROUPED_16, **_EVERY_OTHER, sliding_window_pattern=2),
    "gemma": lambda: GemmaConfig(**_GROUPED_16),
    "glm": lambda: GlmConfig(**_GROUPED_16, partial_rotary_factor=0.5),
    "glm4": lambda: Glm4Config(**_GROUPED_16, partial_rotary_factor=0.5, attention_bias=True),
    "ministral": lambda: MinistralConfig(**_GROUPED_16, **_EVERY_OTHER),
    "olmo3": lambda: Olmo3Config(**_GROUPED, **_EVERY_OTHER),
    "seed_oss": lambda: SeedOssConfig(**_GROUPED_16, attention_out_bias=True),
    "smollm3": lambda: SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0]),
    "starcoder2": lambda: Starcoder2Config(**_GROUPED),
}

# More with mixtures of experts than Mixtral, which attend as others do.
_MIXTURE_CONFIGS: dict[str, Callable[[], Any]] = {
    "olmoe": lambda: OlmoeConfig(
        **_GROUPED | {"intermediate_size": 64}, num_experts=6, num_experts_per_tok=3
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_GROUPED_16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    # The second layer has an MLP in place of experts.
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_GROUPED_16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}

_OF_BOTH_KINDS = ["sliding_attention", "full_attention"] * 2
# What attends in a way of its own: with sinks, in chunks, to the keys and values of another layer.
_PECULIAR_CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt_oss": lambda: GptOssConfig(
        **_GROUPED_16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama4": lambda: Llama4TextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 4},
        intermediate_size_mlp=128,
        num_local_experts=4,
        attention_chunk_size=WINDOW,
        floor_scale=4,
    ),
    "gemma3n": lambda: Gemma3nTextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=_OF_BOTH_KINDS,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        global_head_dim=32,
        layer_types=_OF_BOTH_KINDS,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
    ),
}

# No power of two: ALiBi has two series then.
_SIX_HEADS: dict[str, Any] = _COMMON | {"hidden_size": 96, "num_attention_heads": 6}
# What computes attention itself, or several times a layer.
_REBOUND_CONFIGS: dict[str, Callable[[], Any]] = {
    "bloom": lambda: BloomConfig(**_SIX_HEADS),
    "codegen": lambda: CodeGenConfig(**_COMMON, rotary_dim=8),
    "diffllama": lambda: DiffLlamaConfig(**_GROUPED),
    "doge": lambda: DogeConfig(**_GROUPED),
    "falcon": lambda: FalconConfig(**_COMMON),
    "falcon_alibi": lambda: FalconConfig(**_SIX_HEADS, alibi=True, multi_query=False, bias=True),
    "falcon_grouped": lambda: FalconConfig(**_COMMON, new_decoder_architecture=True, num_kv_heads=2),
    "gpt_neo": lambda: GPTNeoConfig(
        **_COMMON, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=WINDOW
    ),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseConfig(**_COMMON),
    "gptj": lambda: GPTJConfig(**_COMMON, rotary_dim=8),
    "hrm_text": lambda: HrmTextConfig(**_COMMON | {"num_hidden_layers": 1}, L_cycles=1),
    "mpt": lambda: MptConfig(**_SIX_HEADS, max_seq_len=MAX_POSITIONS, attn_config={"clip_qkv": 2.0}),
    "openai_gpt": lambda: OpenAIGPTConfig(**_COMMON, n_positions=MAX_POSITIONS),
    "xglm": lambda: XGLMConfig(**_COMMON, d_model=64, ffn_dim=128, num_layers=2, attention_heads=4),
}

_RECURRENT: dict[str, Any] = {
    name: _COMMON[name]
    for name in _COMMON
    if name not in ("intermediate_size", "num_attention_heads", "max_position_embeddings")
}
_HYBRID: dict[str, Any] = _GROUPED | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

# Steps large enough for a token to show in the state, small enough for one to be remembered for long.
_RECURRENT_CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: MambaConfig(**_RECURRENT, state_size=8, time_step_min=0.05, time_step_max=0.5),
    "mamba2": lambda: Mamba2Config(
        **_RECURRENT,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=16,
        chunk_size=8,
        time_step_min=0.05,
        time_step_max=0.5,
    ),
    "granite_hybrid": lambda: GraniteMoeHybridConfig(**_HYBRID, **_SCALED, num_local_experts=0),
    "granite_hybrid_moe": lambda: GraniteMoeHybridConfig(
        **_HYBRID,
        **_SCALED,
        num_local_experts=4,
        num_experts_per_tok=2,
        position_embedding_type="rope",
    ),
    "qwen3_5_hybrid": lambda: Qwen3_5TextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
    ),
    "qwen3_next_hybrid": lambda: Qwen3NextConfig(
        **_GROUPED_16 | {"num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "bamba_hybrid": lambda: BambaConfig(
        **_GROUPED | {"num_hidden_layers": 3},
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=8,
    ),
    "nemotron_h_hybrid": lambda: NemotronHConfig(
        **{name: value for name, value in _GROUPED_16.items() if name != "num_hidden_layers"},
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=8,
    ),
    "rwkv": lambda: RwkvConfig(**_RECURRENT, attention_hidden_size=64, context_length=MAX_POSITIONS),
    "lfm2_hybrid": lambda: Lfm2Config(
        **_GROUPED | {"num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"]
    ),
}

# Changes that give Gemma 4's layers the experts that its larger models have.
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

# And Nemotron-H's those without gates that its models since Nemotron 3 have.
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)  # all layers attend
FURTHER_FAMILIES: tuple[str, ...] = tuple(_FURTHER_CONFIGS)  # so they do here
PECULIAR_FAMILIES: tuple[str, ...] = tuple(_PECULIAR_CONFIGS)  # so do these
REBOUND_FAMILIES: tuple[str, ...] = tuple(_REBOUND_CONFIGS)  # and these
RECURRENT_FAMILIES: tuple[str, ...] = tuple(_RECURRENT_CONFIGS)  # some or all carry a state instead


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A fresh configuration of `family`: hidden 64, head size 16, 512 ids, 256 places if they are limited.

    `changes` are set in it afterwards.
    """
    attending = _CONFIGS | _FURTHER_CONFIGS | _MIXTURE_CONFIGS | _PECULIAR_CONFIGS | _REBOUND_CONFIGS
    config = (attending | _RECURRENT_CONFIGS)[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random model of `family`, as `random_model` makes it."""
    return random_model(tiny_config(family, **changes), seed, dtype)


def random_model(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model in evaluation mode on the CPU; equal arguments give equal weights.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        eager = built_with(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "eager")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=eager)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at one and zero, which would hide errors in them
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model.requires_grad_(False).to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `VOCAB_SIZE` ids that encodes any text, with a ChatML template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe()),
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=BOS_TOKEN,
        additional_special_tokens=[START_TOKEN],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_model(
    family: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write model, tokenizer and generation_config into `directory` (made if missing) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_model(family, seed, dtype, **changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID], "pad_token_id": BOS_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def save_foreign_model(kind: str, directory: Path) -> Path:
    """A model that is none to serve, with a tokenizer: an encoder ("bert") or a classifier ("classifier")."""
    if kind == "bert":
        config: PreTrainedConfig = BertConfig(**{**_COMMON, "initializer_range": 0.02})
        BertForMaskedLM(config).save_pretrained(directory)
    else:
        LlamaForSequenceClassification(tiny_config("llama")).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@cache
def _trained_bpe() -> str:
    """The tokenizer as JSON; trained once a process from a fixed text, so that every run has the same ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS_TOKEN, START_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()


_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the river runs slowly towards the distant sea.",
    "A server answers many requests at once; each of them is independent of its neighbours.",
    "Once upon a time there was a little girl who lived in a village near the forest with her mother.",
    "The capital of France is Paris, and the capital of Germany is Berlin. What is the capital of Italy?",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(add(index, 1))\n",
    "system user assistant You are a helpful assistant. Please write a short story about the weather.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000. Caf\u00e9, na\u00efve, \u4f60\u597d, \U0001f642.",
    "Tokens are drawn one after another, and the words that come out should read like the language.",
)
