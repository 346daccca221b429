"""PassRows: the rows of a pass in one recurrent layer, each sequence's behind what its slot keeps."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import take
from engine.compute.recurrent.state_kernel import ConvInputs
from engine.compute.recurrent.state_space import convolve
from engine.compute.steady_numbers import alike


class PassRows:
    """N new rows, [N, row_width], of which and of kept ones the pass mixes M. `keep` must follow, once."""

    def __init__(self, rows: Tensor, slots: LayerSlots) -> None:
        self._rows = rows
        self._slots = slots
        self.convolved_whole: Tensor | None = None  # [M, row_width], where a kernel has convolved them

    @cached_property
    def extended(self) -> Tensor:
        """As LayerSlots.extend gives them: [X, row_width]."""
        return self._slots.extend(self._rows)

    @cached_property
    def mixed(self) -> Tensor:
        """Those that are mixed: [M, row_width]."""
        return take(self.extended, self._slots.step.mixed)

    def convolved(self, conv: Any, *, activated: bool = True) -> tuple[Tensor, Tensor]:
        """The causal depthwise convolution `conv` of the first columns, and the others: both [M, ...].

        It goes through SiLU where it is `activated`.
        """
        channels = len(conv.weight)
        self.convolved_whole = whole = self._by_kernel(conv, activated=activated)
        if whole is not None:
            return whole[:, :channels], whole[:, channels:]
        output = convolve(self.extended, conv, self._slots)
        return alike(F.silu, output) if activated else output, self.mixed[:, channels:]

    def keep(self) -> None:
        """Put into the slots what the next pass may need."""
        if self.convolved_whole is None:
            self._slots.keep(self.extended)

    def _by_kernel(self, conv: Any, *, activated: bool) -> Tensor | None:
        """All M rows, their first columns convolved, and what is to be kept is; None without a kernel."""
        slots, step = self._slots, self._slots.step
        if slots.kernel is None:
            return None
        inputs = ConvInputs(
            rows=self._rows,
            kept=slots.rows,
            weight=conv.weight[:, 0],
            bias=conv.bias,
            before=step.conv_width,
            num_mixed=step.num_mixed,
            activated=activated,
        )
        return slots.kernel.convolve(inputs, step.runs, step.joins)
