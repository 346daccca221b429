"""EagleWeights: an EAGLE layer as those who serve it read it, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.eagle_layer import EagleLayer, EagleShape

# How many positions a layer sees that was trained without a bound: its K/V has one all the same.
DEFAULT_WINDOW = 512


@dataclass(frozen=True, slots=True)
class EagleSizes:
    """Of the layer: its width, its heads, and how many positions one sees."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int

    @classmethod
    def of(cls, config: LlamaConfig, shape: EagleShape) -> EagleSizes:
        """Those of a layer by what its files say of it."""
        return cls(
            hidden=int(config.hidden_size),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=int(config.head_dim),
            window=shape.window or DEFAULT_WINDOW,
        )

    @property
    def kv(self) -> LayerKv:
        """What is kept of a position."""
        return LayerKv(self.kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """The layer's tensors, in the target's dtype on its device; [out, in] where they multiply.

    Draft token n is the target's `token_ids[n]`. With `norms_residual` the normed input goes past attention,
    and not the input itself.
    """

    sizes: EagleSizes
    eps: float
    fuse: torch.Tensor  # [hidden, features]
    hidden_norm: torch.Tensor  # [hidden], as all norms
    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, 2 * hidden], of embedding and hidden state
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    last_norm: torch.Tensor
    head: torch.Tensor  # [draft tokens, hidden]
    token_ids: torch.Tensor  # int64 [draft tokens]
    embedding: nn.Embedding
    rotary: nn.Module
    norms_residual: bool

    @classmethod
    def of(cls, layer: EagleLayer) -> EagleWeights:
        """Those of a layer; what is joined is copied, the rest is not."""
        config, middle = layer.config, layer.midlayer
        attention, mlp = middle.self_attn, middle.mlp
        return cls(
            EagleSizes.of(config, layer.shape),
            eps=float(config.rms_norm_eps),
            fuse=layer.fc.weight,
            hidden_norm=middle.hidden_norm.weight,
            input_norm=middle.input_layernorm.weight,
            qkv=torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]),
            output=attention.o_proj.weight,
            mlp_norm=middle.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            last_norm=layer.norm.weight,
            head=layer.projection.weight.to(layer.fc.weight.dtype),
            token_ids=layer.token_ids,
            embedding=layer.embedding,
            rotary=LlamaRotaryEmbedding(config).to(layer.fc.weight.device),  # its angles stay float32
            norms_residual=layer.shape.norms_residual,
        )
