"""LatentKv: multi-head latent attention over what it stores of a token, in place of what that expands to.

A token's keys and values of all heads are made of one short row by `kv_b_proj`. Its keys' half is applied to
the queries instead, and its values' half to what was attended to: all heads then share one key, the row and
the rotated part behind it, whose first numbers are the value, too. DeepSeek-AI, "DeepSeek-V2", 2024, 2.1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.compute.steady_numbers import in_blocks

_NAME = "slipstream_latent"


class LatentKv:
    """Stands for a layer's `expand_kv` while it attends with one of the functions `names`."""

    def __init__(self, layer: Any, names: Collection[str]) -> None:
        self._layer = layer
        self._names = names
        self._expand = layer.expand_kv

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The step's keys [1, 1, N, rank + rotated] and values [1, 1, N, rank], which are in them."""
        if self._layer.config._attn_implementation not in self._names:
            expanded: tuple[Tensor, Tensor] = self._expand(kv_nope, k_rot)
            return expanded
        key = torch.cat((kv_nope, k_rot), dim=-1)
        return key, key[..., : kv_nope.shape[-1]]

    def ask(self, query: Tensor) -> Tensor:
        """Queries [1, heads, N, key_dim] as they are scored against stored keys."""
        by_key, _ = self.weights()
        plain, rotated = query[..., : by_key.shape[1]], query[..., by_key.shape[1] :]
        return torch.cat((in_blocks(lambda block: block @ by_key, plain), rotated), dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """The values [1, N, heads, value_dim] of what was attended to, [1, N, heads, rank]."""
        _, by_value = self.weights()
        by_row = by_value.transpose(1, 2)
        return in_blocks(lambda block: block @ by_row, attended.transpose(1, 2)).transpose(1, 2)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Each head's part of `kv_b_proj` for keys and for values: [heads, its dim, rank]."""
        layer, weight = self._layer, self._layer.kv_b_proj.weight
        by_head = weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, weight.shape[1])
        return by_head[:, : layer.qk_nope_head_dim], by_head[:, layer.qk_nope_head_dim :]


def keep_latents(model: PreTrainedModel, names: Collection[str]) -> None:
    """Have every such layer of `model` store its latent row where it attends with one of `names`.

    Where its projection is stored in few bits, and in float32 on CUDA, whose products of three parts outgrow
    a kernel's registers, a layer stores what it expands to.
    """
    for layer in model.modules():
        if hasattr(type(layer), "expand_kv") and not hasattr(layer, _NAME) and _stores_rows(layer):
            layer.expand_kv = latent = LatentKv(layer, names)
            setattr(layer, _NAME, latent)


def leave_latents(model: nn.Module, like: nn.Module) -> None:
    """Have `keep_latents` pass over those layers of `model` that it passes over in `like`, of the same class.

    A model without weights does not show whose are stored in few bits, nor where.
    """
    for name, layer in like.named_modules():
        if hasattr(type(layer), "expand_kv") and not _stores_rows(layer):
            setattr(model.get_submodule(name), _NAME, None)


def latent_of(layer: nn.Module) -> LatentKv | None:
    """What `keep_latents` gave the layer, if anything."""
    found: LatentKv | None = getattr(layer, _NAME, None)
    return found


def _stores_rows(layer: Any) -> bool:
    projection = layer.kv_b_proj
    if type(projection) is not nn.Linear or projection.bias is not None:
        return False
    return not (projection.weight.is_cuda and projection.weight.dtype is torch.float32)
