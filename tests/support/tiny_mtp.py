"""Tiny random models whose files hold an MTP module in the published layout, and a plain pass of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# What a layer adds to its input ends in these.
_LAYER_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
WINDOWLESS = 40  # tokens of the longest sequence that tests read; the module's K/V holds more


@dataclass(frozen=True)
class Family:
    """How a tiny model of it is made, and what its module's tensors are called.

    `norms` are those of the embedding and of the hidden state, `projection` joins them, `last` is the last
    norm; all behind `prefix`, as is the decoder layer behind `layer`.
    """

    config: Any
    prefix: str = "model.layers.{n}."
    norms: tuple[str, str] = ("enorm", "hnorm")
    projection: str = "eh_proj"
    last: str = "shared_head.norm"
    layer: str = ""
    hidden_first: bool = False
    reads_normed: bool = True
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")  # of the target's, stored again
    one_more: bool = False  # norms scale by one more than their weights
    stored_as: Mapping[str, Any] = field(default_factory=dict)  # what its config.json says otherwise


_HYBRID: dict[str, Any] = _COMMON | {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_QWEN: dict[str, Any] = {
    "prefix": "mtp.",
    "norms": ("pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    "projection": "fc",
    "last": "norm",
    "layer": "layers.0.",
    "copies": (),
    "one_more": True,
}

FAMILIES = {
    "glm4_moe": Family(
        lambda: Glm4MoeConfig(**_COMMON, **_ROUTED, head_dim=16, partial_rotary_factor=0.5, use_qk_norm=True)
    ),
    "deepseek_v3": Family(
        lambda: DeepseekV3Config(
            **_COMMON | {"num_key_value_heads": 4},
            **_ROUTED,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
        )
    ),
    "glm4_moe_lite": Family(
        lambda: Glm4MoeLiteConfig(
            **_COMMON | {"num_key_value_heads": 4},
            **{name: value for name, value in _ROUTED.items() if name != "first_k_dense_replace"},
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
        )
    ),
    "mimo": Family(
        lambda: Qwen2Config(**_COMMON),
        prefix="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm"),
        projection="input_proj",
        last="final_layernorm",
        hidden_first=True,
        reads_normed=False,
        copies=(),
        stored_as={
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3_5": Family(lambda: Qwen3_5TextConfig(**_HYBRID), **_QWEN),
    "qwen3_5_moe": Family(lambda: Qwen3_5MoeTextConfig(**_HYBRID, **_EXPERTS), **_QWEN),
    "qwen3_next": Family(lambda: Qwen3NextConfig(**_HYBRID, **_EXPERTS), **_QWEN),
}


class TinyMtp:
    """A target of `family` and its module: `whole` is a model of one layer more, whose last is the module's.

    With `copies_last_token` the module's guesses hang on the newest token alone, nearly. `changes` are made
    in the configuration.
    """

    def __init__(
        self, family: str, seed: int = 0, *, copies_last_token: bool = False, **changes: Any
    ) -> None:
        self.family = FAMILIES[family]
        config = self.family.config()
        for name, value in changes.items():
            setattr(config, name, value)
        self.num_layers = int(config.num_hidden_layers)
        longer = copy.deepcopy(config)
        longer.num_hidden_layers = self.num_layers + 1
        for name in ("layer_types", "mlp_layer_types"):
            if (kinds := getattr(config, name, None)) is not None:
                setattr(longer, name, [*kinds, {"layer_types": "full_attention"}.get(name, "sparse")])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.config = config
            self.whole: PreTrainedModel = AutoModelForCausalLM.from_config(
                longer, attn_implementation="eager"
            )
            for name, parameter in self.whole.named_parameters():
                if parameter.ndim == 1:
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
                if copies_last_token and name.endswith(_LAYER_ENDS):
                    parameter.data *= 0.06
            size = int(config.hidden_size)
            at_rest = 0.0 if self.family.one_more else 1.0
            self.norms = [at_rest + 0.2 * torch.randn(size) for _ in range(3)]  # two inputs', the last
            self.projection = 0.2 * torch.randn(size, 2 * size)
            if copies_last_token:
                self.whole.lm_head.weight.data *= 0.2
                self.whole.model.embed_tokens.weight.data *= 5  # beside what layers add to it
                self.whole.lm_head.weight.data[EOS_ID : EOS_ID + 17] *= 15.0
                self.norms = [torch.full((size,), at_rest), torch.full((size,), at_rest)]
                self.norms.append(self.whole.model.norm.weight.data.clone())
                embedded = torch.eye(size) * self.whole.model.embed_tokens.weight.std()
                halves = [torch.zeros(size, size), embedded]
                self.projection = torch.cat(halves if self.family.hidden_first else halves[::-1], dim=1)
        self.whole.requires_grad_(False).eval()

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
        """As a directory that can be served."""
        self.whole.to(dtype).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        family, prefix = self.family, self.family.prefix.format(n=self.num_layers)
        layer = f".layers.{self.num_layers}."
        tensors = {
            (prefix + family.layer + name.split(layer)[1] if layer in name else name): tensor
            for name, tensor in tensors.items()
        }
        for name, weight in zip((*family.norms, family.last), self.norms, strict=True):
            tensors[f"{prefix}{name}.weight"] = weight.to(dtype)
        tensors[f"{prefix}{family.projection}.weight"] = self.projection.to(dtype)
        stored_again = ("model.embed_tokens.weight", "lm_head.weight")
        for name, theirs in zip(family.copies, stored_again, strict=False):
            tensors[f"{prefix}{name}.weight"] = tensors[theirs].clone()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        self.config.architectures = [type(self.whole).__name__]
        self.config.dtype = dtype
        values = self.config.to_dict() | self.family.stored_as
        (directory / "config.json").write_text(json.dumps(values, default=str))
        self.whole.to(torch.float32)
        return directory

    def features(self, token_ids: Sequence[int]) -> torch.Tensor:
        """What leaves the target's last layer at every token: [n, hidden]."""
        left: list[torch.Tensor] = []
        layers: Any = self.whole.model.layers
        handle = layers[self.num_layers - 1].register_forward_hook(lambda *call: left.append(call[2]))
        try:
            self.whole(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            handle.remove()
        return left[0][0]

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What the module goes on from."""
        if not self.family.reads_normed:
            return features
        return self._norm(features, self.whole.model.norm.weight)

    def forward(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """The module's normed output [n, hidden] at positions 0 to n - 1, all at once."""
        base: Any = self.whole.model
        embedded = self._norm(base.embed_tokens(torch.tensor(list(token_ids))), self.norms[0])
        parts = [embedded, self._norm(hidden, self.norms[1])]
        fused = torch.cat(parts[::-1] if self.family.hidden_first else parts, dim=-1) @ self.projection.T
        count = len(hidden)
        positions = torch.arange(count)[None]
        later = torch.ones(count, count).triu(1).bool()
        mask = torch.zeros(count, count).masked_fill(later, -torch.inf)[None, None]
        out = base.layers[self.num_layers](
            fused[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=base.rotary_emb(fused[None], positions),
        )
        return self._norm(out[0], self.norms[2])

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Of every token."""
        logits: torch.Tensor = out @ self.whole.lm_head.weight.T
        return logits

    @torch.inference_mode()
    def chain(self, features: torch.Tensor, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """The likeliest drafts behind `token_ids`, from the `features` of all but the last, each anew."""
        hidden, known = self.read(features), list(token_ids)
        for _ in range(num_drafts):
            out = self.forward(hidden, known[1:])
            known.append(int(self.logits(out[-1]).argmax()))
            hidden = torch.cat([hidden, out[-1:]])
        return known[len(token_ids) :]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = 1 + weight if self.family.one_more else weight
        normed: torch.Tensor = x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return normed * scale
