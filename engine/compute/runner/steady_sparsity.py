"""How many of an MLP's gates stay open, where a model works that out in every pass: once, before any.

Gemma 3n closes all gates but the largest, by their mean and spread (its activation sparsity), and asks anew
in each pass how many spreads that is: on a device the host would wait for the answer, and no graph could be
recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_METHOD = "_gaussian_topk"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Threshold:
    """Stands for the method of an MLP that closes a part `sparsity` of the gates, as that computes it."""

    def __init__(self, sparsity: float) -> None:
        normal = torch.distributions.Normal(0.0, 1.0)
        spreads: torch.Tensor = normal.icdf(torch.tensor(sparsity))  # type: ignore[no-untyped-call]
        self._spreads = {dtype: float(spreads.to(dtype)) for dtype in _DTYPES}  # rounded as a tensor is

    def __call__(self, gates: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        spread = torch.std(gates, dim=-1, keepdim=True, unbiased=False)
        return nn.functional.relu(
            gates - (gates.mean(-1, keepdim=True) + spread * self._spreads[gates.dtype])
        )


def keep_sparsity(model: nn.Module) -> None:
    """Have such MLPs of `model` use one threshold for all passes; a second call changes nothing."""
    for module in model.modules():
        own: Any = module
        if not hasattr(type(module), _METHOD) or _METHOD in vars(module):
            continue
        if own.activation_sparsity > 0:
            setattr(own, _METHOD, _Threshold(own.activation_sparsity))
