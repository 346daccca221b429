"""DeltaCase: random tokens of some sequences, and states for them to meet by the delta rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.compute.recurrent.delta_kernel import DeltaInputs, DeltaKernel
from engine.compute.recurrent.delta_rule import delta_scan
from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep

MOST_ROWS = 256


class DeltaCase:
    """Sequences of so many rows and drafts behind them; their slots lie the other way round, one is free.

    A row has the same numbers in each case of the same heads, whatever sequence it is in.
    """

    def __init__(
        self,
        counts: Sequence[int],
        drafts: Sequence[int],
        heads: int,
        key_heads: int,
        keys: int,
        values: int,
        *,
        by_channel: bool = False,
    ) -> None:
        num = len(counts)
        new = np.array(counts) + np.array(drafts)
        pieces = Pieces(np.arange(num)[::-1].copy(), np.zeros(num, bool), new, 0 * new, np.array(drafts))
        self.step = SlotStep(pieces, 0, max(drafts, default=0), torch.device("cpu"))

        def noise(*shape: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(sum(shape))
            return torch.randn(MOST_ROWS, *shape, generator=generator)[: new.sum()]

        query, key = (each / each.norm(dim=-1, keepdim=True) for each in noise(2, key_heads, keys).unbind(1))
        logs = -noise(heads, keys if by_channel else 1).abs() / 3
        self.inputs = DeltaInputs(query, key, noise(heads, values), logs, noise(heads).sigmoid())
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(num + 1, heads, keys, values, generator=generator)

    def run(self, kernel: DeltaKernel | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes of the rows, and the states behind them; `state` stays as it is."""
        state = self.state.clone()
        return delta_scan(self.inputs, LayerSlots(self.step, torch.empty(0), state, kernel)), state
