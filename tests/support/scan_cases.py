"""ScanCase: random tokens of some sequences, and states that they advance by a recurrent layer's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.compute.recurrent.delta_rule import delta_scan
from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.state_kernel import (
    DeltaInputs,
    GatedDelta,
    GatedStructured,
    SelectiveInputs,
    StateKernel,
    StructuredInputs,
)
from engine.compute.recurrent.state_space import selective_scan, structured_scan

MOST_ROWS = 256


class ScanCase:
    """Sequences of so many rows and drafts behind them; their slots lie the other way round, one is free.

    A row has the same numbers in each case of the same sizes, whatever sequence it is in.
    """

    def __init__(self, scan: Callable[..., torch.Tensor], inputs: Any, shape: Sequence[int]) -> None:
        """`inputs` has MOST_ROWS rows in its tensors, but for `rates`; a state has `shape`."""
        self.scan = scan
        self._inputs = inputs
        self.shape = shape

    def inputs_on(self, device: torch.device, count: int) -> Any:
        """Those of so many rows, there."""
        inputs = rows_of(self._inputs, 0, count)
        return type(inputs)(*(each.to(device) for each in inputs))

    def of(self, counts: Sequence[int], drafts: Sequence[int]) -> ScanRun:
        """These sequences."""
        new = np.array(counts) + np.array(drafts)
        slots = np.arange(len(counts))[::-1].copy()
        pieces = Pieces(slots, np.zeros(len(counts), bool), new, 0 * new, np.array(drafts))
        step = SlotStep(pieces, 0, max(drafts, default=0), torch.device("cpu"))
        state = torch.randn(len(counts) + 1, *self.shape, generator=torch.Generator().manual_seed(0))
        return ScanRun(self.scan, self.inputs_on(torch.device("cpu"), int(new.sum())), state, step)


class ScanRun:
    """A case with its sequences."""

    def __init__(
        self, scan: Callable[..., torch.Tensor], inputs: Any, state: torch.Tensor, step: SlotStep
    ) -> None:
        self.inputs = inputs
        self.state = state
        self.step = step
        self._scan = scan

    def run(self, kernel: StateKernel | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes of the rows, and the states behind them; `state` stays as it is."""
        state = self.state.clone()
        return self._scan(self.inputs, LayerSlots(self.step, torch.empty(0), state, kernel)), state


def rows_of(inputs: Any, first: int, stop: int) -> Any:
    """The inputs of some rows."""
    return inputs._replace(
        **{name: each[first:stop] for name, each in inputs._asdict().items() if name != "rates"}
    )


def delta_case(heads: int, key_heads: int, keys: int, values: int, *, by_channel: bool = False) -> ScanCase:
    """The gated delta rule."""
    query, key = (each / each.norm(dim=-1, keepdim=True) for each in _noise(2, key_heads, keys).unbind(1))
    logs = -_noise(heads, keys if by_channel else 1).abs() / 3
    inputs = DeltaInputs(query, key, _noise(heads, values), logs, _noise(heads).sigmoid())
    return ScanCase(delta_scan, inputs, (heads, keys, values))


def structured_case(heads: int, groups: int, dim: int, size: int) -> ScanCase:
    """One decay for each head."""
    b, c = _noise(2, groups, size).unbind(1)
    inputs = StructuredInputs(_noise(heads, dim), -_noise(heads).abs() / 3, b, c)
    return ScanCase(structured_scan, inputs, (heads, dim, size))


def selective_case(channels: int, size: int) -> ScanCase:
    """One decay for each number of the state."""
    b, c = _noise(2, size).unbind(1)
    rates = -_noise(channels, size)[0].abs()
    inputs = SelectiveInputs(_noise(channels), _noise(channels).sigmoid(), rates, b, c)
    return ScanCase(selective_scan, inputs, (channels, size))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(MOST_ROWS, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def gated_delta_of(
    sizes: tuple[int, int, int, int], num_rows: int
) -> tuple[GatedDelta, tuple[int, int, int]]:
    """A layer of (heads, key heads, keys, values) with gates far to either side; and its state's shape."""
    heads, key_heads, keys, values = sizes
    noise = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 2 * key_heads * keys + heads * values + 2 * heads, generator=noise)
    rows[:, -2 * heads :] *= 4
    rows[:: len(rows) // 3, -heads:] += 30  # at some tokens next to nothing is left
    decays, bias = torch.randn(2, heads, generator=noise)
    return GatedDelta(rows, decays, bias, key_heads, keys, values, 2.0), (heads, keys, values)


def gated_structured_of(
    sizes: tuple[int, int, int, int], num_rows: int
) -> tuple[GatedStructured, tuple[int, int, int]]:
    """A layer of (heads, groups, dim, size) with gates far to either side; and its state's shape."""
    heads, groups, dim, size = sizes
    noise = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, heads * dim + 2 * groups * size + heads, generator=noise)
    rows[:, -heads:] *= 4
    decays, bias, direct = torch.randn(3, heads, generator=noise)
    return GatedStructured(rows, decays, bias, direct, dim, groups, size, (0.01, 30.0)), (heads, dim, size)


def by_channel_of(
    sizes: tuple[int, int, int, int], num_rows: int
) -> tuple[DeltaInputs, tuple[int, int, int]]:
    """Kimi's delta rule of (heads, key heads, keys, values), some decays strong; and its state's shape."""
    heads, key_heads, keys, values = sizes
    noise = torch.Generator().manual_seed(num_rows)
    query, key = torch.randn(2, num_rows, key_heads, keys, generator=noise)
    value = torch.randn(num_rows, heads, values, generator=noise)
    logs = -torch.randn(num_rows, heads, keys, generator=noise).abs() / 3
    logs[::5] *= 300  # next to nothing is left
    beta = torch.randn(num_rows, heads, generator=noise).sigmoid()
    query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query, key))
    return DeltaInputs(query, key, value, logs, beta), (heads, keys, values)


def lightning_of(
    sizes: tuple[int, int, int, int], num_rows: int
) -> tuple[StructuredInputs, tuple[int, int, int]]:
    """Lightning attention of (heads, groups, dim, size), its decays as they come; and its state's shape."""
    heads, groups, dim, size = sizes
    noise = torch.Generator().manual_seed(num_rows)
    inputs = torch.randn(num_rows, heads, dim, generator=noise)
    b, c = torch.randn(2, num_rows, groups, size, generator=noise)
    logs = -torch.randn(num_rows, heads, generator=noise).abs() / 3
    logs[::5] *= 300
    return StructuredInputs(inputs, logs, b, c), (heads, dim, size)


def as_served(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The same there, of a model in `dtype`: what its layers give the kernel in float32 stays so."""
    exact = {DeltaInputs: ("query", "key", "logs", "beta"), StructuredInputs: ("logs",)}.get(type(inputs), ())
    return inputs._replace(
        **{
            name: each.to(device) if name in exact else each.to(device, dtype)
            for name, each in inputs._asdict().items()
            if isinstance(each, torch.Tensor)
        }
    )


def runs_of(prompts: list[tuple[int, int, int]]) -> torch.Tensor:
    """Of sequences in (slot, rows, rows taken in); and one that no sequence has, as recorded steps have."""
    slots, counts, taken = (np.array(each) for each in zip(*prompts, strict=True))
    runs = np.stack((slots, np.cumsum(counts) - counts, counts, taken))
    return torch.nn.functional.pad(torch.from_numpy(runs), (0, 1), value=-1)
