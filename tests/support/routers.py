"""Routers of transformers by themselves, with random weights."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# Each family's with what makes it another than the first's.
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_next": {"num_experts": 96, "num_experts_per_tok": 10},
    "qwen3_5_moe": {},
    "olmoe": {"norm_topk_prob": False},
    "flex_olmo": {},
    "mellum": {},
    "mixtral": {},
    "minimax": {},
    "gpt_oss": {},
    "deepseek_v2": {"topk_method": "greedy", "routed_scaling_factor": 1.7},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
}
BY_GROUPS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "glm4_moe": {},
    "glm4_moe_lite": {"routed_scaling_factor": 1.8},
    "kimi_linear": {"n_group": 2, "topk_group": 1},
    "bailing_hybrid": {"n_group": 8, "topk_group": 4},
    "nemotron_h": {"norm_topk_prob": False},
    "dots1": {},
    "axk1": {},
    "exaone_moe": {},
    "mimo_v2_flash": {},
    "solar_open": {},
}
_SIZES = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")


def router_of(family: str, hidden: int, dtype: torch.dtype) -> Any:
    """The router of a family for rows [N, hidden]."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = next(name for name in vars(module) if name.endswith(("TopKRouter", "TopkRouter")))
    sizes = {**_SIZES, **PLAIN.get(family, {}), **BY_GROUPS.get(family, {})}
    counts = dict.fromkeys(_COUNTS, sizes["num_experts"])
    router: nn.Module = getattr(module, name)(SimpleNamespace(hidden_size=hidden, **{**sizes, **counts}))
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_()
    for parameter in router.parameters():
        parameter.data = parameter.data.to(dtype)
    return router.requires_grad_(False)
