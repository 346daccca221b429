"""Mixture: random experts, rows for them, and what they make of these, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from engine.compute.native.kernels import NativeKernels
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import Activation, Experts

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: torch.nn.functional.silu,
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.RELU_SQUARED: lambda x: x.relu().square(),
}


def gated(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What a gate makes of what it is multiplied with."""
    if activation is not Activation.SWIGLU_LIMITED:
        return ACTIVATIONS[activation](gate) * up
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


@dataclass(frozen=True)
class Mixture:
    """Experts' weights: [COUNT, 2 * width, hidden], half of it without gates, and [COUNT, hidden, width]."""

    COUNT: ClassVar[int] = 6

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation = Activation.SILU

    @classmethod
    def random(
        cls,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        activation: Activation = Activation.SILU,
        *,
        is_gated: bool = True,
    ) -> Mixture:
        """Some whose outputs are about as large as what they are given."""
        generator = torch.Generator().manual_seed(0)
        outputs = 2 * width if is_gated else width
        gate_up = torch.randn(cls.COUNT, outputs, hidden, generator=generator) / hidden**0.5
        down = 2 * torch.randn(cls.COUNT, hidden, width, generator=generator) / width**0.5
        return cls(gate_up.to(dtype), down.to(dtype), activation)

    @property
    def is_gated(self) -> bool:
        """False for down(activation(up(x)))."""
        return self.gate_up.shape[1] > self.down.shape[2]

    def packed(self, kernels: NativeKernels, block_format: int | None = None) -> PackedExperts:
        """In panels, rounded to a format if one is given."""
        gate_up, down = (kernels.pack(weight.flatten(0, 1)) for weight in (self.gate_up, self.down))
        if block_format is not None:
            gate_up, down = (kernels.quantize(each, block_format) for each in (gate_up, down))
        return PackedExperts(kernels, gate_up, down, self.activation)

    def expected(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """One choice after the other; numbers that no expert has are left out."""
        found = torch.zeros(x.shape, dtype=torch.float64)
        for row, choices in enumerate(chosen.tolist()):
            for place, expert in enumerate(choices):
                if 0 <= expert < self.COUNT:
                    act = self._activated(self.gate_up[expert].double() @ x[row].double())
                    found[row] += shares[row, place].double() * (self.down[expert].double() @ act)
        return found

    def _activated(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return ACTIVATIONS[self.activation](outputs)
        return gated(self.activation, *outputs.chunk(2))


@dataclass(frozen=True)
class PackedExperts:
    """A mixture as the kernels take it."""

    kernels: NativeKernels
    gate_up: PackedWeights
    down: PackedWeights
    activation: Activation

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See NativeKernels.compute_experts."""
        experts = Experts(self.gate_up.record, self.down.record, Mixture.COUNT, self.activation)
        return self.kernels.compute_experts(x, experts, chosen.contiguous(), shares.contiguous())


def random_rows(
    n: int, hidden: int, dtype: torch.dtype, each: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n, hidden], of each row `each` different experts, and their shares, which sum to one."""
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(n, Mixture.COUNT, generator=generator).softmax(dim=-1)
    shares, chosen = scores.topk(each)
    x = torch.randn(n, hidden, generator=generator).to(dtype)
    return x, chosen, shares / shares.sum(dim=-1, keepdim=True)
