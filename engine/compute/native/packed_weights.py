"""PackedWeights: a linear layer's weights in the order that a kernel reads them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.compute.native.records import Product


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights [out, in_features] in a form that only kernels read, by `kind`, and the record of it.

    `bias` is [out], None where the layer has none. Of blocks, `packed` is a table of their panels, and
    `parts` has these. Owns the memory behind `record`, which is good for as long as this is.
    """

    kind: int
    packed: torch.Tensor
    bias: torch.Tensor | None
    out: int
    in_features: int
    parts: tuple[Any, ...] = ()
    record: Product = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bias = None if self.bias is None else self.bias.data_ptr()
        record = Product(self.kind, self.packed.data_ptr(), bias, self.out, self.in_features)
        object.__setattr__(self, "record", record)
