"""Queries that a model makes longer with their positions, which it counts from the start of each pass.

Llama 4 scales the queries of its layers without rotation by their positions (Nakanishi 2025) and takes these
to be 0, 1, 2 … A packed row has any: there the scale is ours, from the positions given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Positions:
    """Of the pass under way: [1, num_tokens], None until there was one."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None

    def take(self, _model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before the model's forward pass."""
        self.given = options.get("position_ids")

    def of(self, queries: torch.Tensor) -> torch.Tensor:
        """Those of `queries` [1, num_tokens, width], shaped to be multiplied with them."""
        count = queries.shape[1]
        positions = torch.arange(count, device=queries.device) if self.given is None else self.given
        return positions.reshape(1, count, 1)


class _Temperature:
    """Scales what a layer's query projection gives, as the layer would after it."""

    def __init__(self, positions: _Positions, layer: Any) -> None:
        self._positions = positions
        self._floor, self._scale = float(layer.floor_scale), float(layer.attn_scale)

    def __call__(self, _projection: nn.Module, _args: tuple[Any, ...], queries: torch.Tensor) -> torch.Tensor:
        """Computed in float32 and rounded once, as in transformers."""
        steps = torch.floor((self._positions.of(queries).float() + 1.0) / self._floor)
        return (queries * (torch.log1p(steps) * self._scale + 1.0)).to(queries.dtype)


def scale_by_position(model: nn.Module) -> None:
    """Have such layers of `model` scale by the positions that a pass gives; a second call changes nothing."""
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if getattr(layer, "attn_temperature_tuning", False) and not getattr(layer, "use_rope", True)
    ]
    if not layers:
        return
    positions = _Positions()
    model.register_forward_pre_hook(positions.take, with_kwargs=True)
    for layer in layers:
        layer.attn_temperature_tuning = False
        layer.q_proj.register_forward_hook(_Temperature(positions, layer))
