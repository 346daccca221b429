"""NativeExperts: a stand-in for the experts of a mixture, which a model's own router chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.compute.loading.stored_weights import ALPHA, LIMIT
from engine.compute.native.families import (
    has_limited_experts,
    has_read_experts,
    has_shapes_of_experts,
    weights_of_experts,
)
from engine.compute.native.kernels import PANEL, NativeKernels
from engine.compute.native.modules import NativeLinear, activation_of
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import Activation, Experts


class NativeExperts(nn.Module):
    """down(activation(gate(x)) * up(x)) of each expert that a row was given to, by their shares summed.

    Or down(activation(up(x))), for experts without gates. `gate_up` and `down` are projections to the outputs
    of all experts, one behind the other; of `gate_up` each has those of its gate first.
    """

    def __init__(self, kernels: NativeKernels, original: Any) -> None:
        if has_limited_experts(original):
            gate_up, down = _packed_limited(kernels, original)
            self._take(kernels, gate_up, down, Activation.SWIGLU_LIMITED)
            return
        gate_up, down = (
            kernels.pack(weights.detach().flatten(0, 1)) for weights in weights_of_experts(original)
        )
        self._take(kernels, gate_up, down, activation_of(original.act_fn))

    @classmethod
    def of(
        cls, kernels: NativeKernels, gate_up: PackedWeights, down: PackedWeights, activation: Activation
    ) -> NativeExperts:
        """Some with weights that are packed."""
        made = cls.__new__(cls)
        made._take(kernels, gate_up, down, activation)
        return made

    def _take(
        self, kernels: NativeKernels, gate_up: PackedWeights, down: PackedWeights, activation: Any
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_up, self.down = (NativeLinear.of(kernels, weights) for weights in (gate_up, down))
        self.num_experts = down.out // gate_up.in_features
        self.activation = activation

    @property
    def record(self) -> Experts:
        """The experts as the kernels take them, for as long as the weights stay where they are."""
        gate_up, down = self.gate_up.weights.record, self.down.weights.record
        return Experts(gate_up, down, self.num_experts, self.activation)

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for experts that can be computed; their output is still to be compared."""
        if not has_read_experts(original):
            return False
        if has_limited_experts(original):
            if (original.alpha, original.limit) != (ALPHA, LIMIT):
                return False
        elif activation_of(original.act_fn) is None:
            return False
        _, hidden, width = weights_of_experts(original)[1].shape
        return has_shapes_of_experts(original, dtype) and hidden % PANEL == width % PANEL == 0

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden] to the same; chosen experts and their shares are [N, each]."""
        return self._kernels.compute_experts(
            hidden_states.contiguous(),
            self.record,
            top_k_index.long().contiguous(),
            top_k_weights.float().contiguous(),
        )


def _packed_limited(kernels: NativeKernels, original: Any) -> tuple[PackedWeights, PackedWeights]:
    """Gate and up, and down, of experts that are stored the other way round, gate and up by turns."""

    def apart(by_turns: torch.Tensor) -> torch.Tensor:  # [experts, 2 * width, ...], gate first
        return torch.cat((by_turns[:, ::2], by_turns[:, 1::2]), dim=1)

    gate_up, down = (weights.detach() for weights in weights_of_experts(original))
    gate_up_bias, down_bias = original.gate_up_proj_bias.detach(), original.down_proj_bias.detach()
    return (
        kernels.pack(apart(gate_up).flatten(0, 1), apart(gate_up_bias).flatten()),
        kernels.pack(down.flatten(0, 1), down_bias.flatten()),
    )
