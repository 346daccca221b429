"""What attention adds to the score of a key by its position: ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeyBias:
    """A slope for each head, by which the scores of later keys are greater (ALiBi, Press et al. 2022).

    Counted from position 0: what that adds to all keys of a query alike, its softmax takes out again.
    `slopes` is [num_heads]; their products with positions are rounded to `dtype`, as the model's own code
    has it, and then multiplied by `scale`.
    """

    slopes: torch.Tensor
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """What the heads add for keys at `positions`: float32 [num_heads, *positions.shape]."""
        slopes = self.slopes.to(self.dtype)
        products = slopes.view(-1, *[1] * positions.dim()) * positions.to(self.dtype)
        return products.float() * self.scale
