"""PaddedLinear: a projection whose outputs fill no panel of packed weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.native.kernels import PANEL, NativeKernels
from engine.compute.native.modules import NativeLinear

# A vocabulary has more outputs for each input; its table is often the embedding's, and would be there twice.
_MOST_OUTPUTS = 8


class PaddedLinear(nn.Module):
    """Computes as many outputs of zeros beside its own as fill the last panel, and leaves them out.

    So the first projection of Mamba 2 is computed, whose heads are not always a multiple of a panel, and so
    are gates of heads. One output, as a shared expert's gate has, would be computed thirty-two times.
    """

    def __init__(self, kernels: NativeKernels, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        spare = -linear.out_features % PANEL
        bias = None if linear.bias is None else F.pad(linear.bias.detach(), (0, spare))
        weight = F.pad(linear.weight.detach(), (0, 0, 0, spare))
        self.padded = NativeLinear.of(kernels, kernels.pack(weight, bias))

    @staticmethod
    def fits(linear: nn.Module, dtype: torch.dtype) -> bool:
        """True for a plain projection that NativeLinear does not take for its width alone."""
        if type(linear) is not nn.Linear or linear.weight.dtype is not dtype:
            return False
        outputs, inputs = linear.weight.shape
        return 1 < outputs < _MOST_OUTPUTS * inputs and outputs % PANEL > 0 and inputs % 2 == 0

    @property
    def weight(self) -> torch.Tensor:
        """See NativeLinear."""
        return self.padded.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], rows apart."""
        outputs: torch.Tensor = self.padded(x)
        return outputs[..., : self.out_features]
