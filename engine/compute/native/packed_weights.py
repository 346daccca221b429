"""PackedWeights: a linear layer's weights in the order that a kernel reads them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.compute.native.records import Product


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights [out, in_features] in a form that only kernels read, by `kind`, and the record they take.

    `scales` is None where the kind has none, `bias` [out] where the layer has none. Of blocks, `packed` is a
    table of their panels, and `parts` has these. Owns the memory behind `record`, which is good for as long
    as this is.
    """

    kind: int
    packed: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    out: int
    in_features: int
    parts: tuple[Any, ...] = ()
    record: Product = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        addresses = (None if part is None else part.data_ptr() for part in (self.scales, self.bias))
        record = Product(self.kind, self.packed.data_ptr(), *addresses, self.out, self.in_features)
        object.__setattr__(self, "record", record)
