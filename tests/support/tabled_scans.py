"""TabledScans: states of recurrent layers, advanced as `runs` tell it when a pass is carried out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.compute.recurrent.state_kernel import (
    ConvInputs,
    DeltaInputs,
    GatedDelta,
    GatedStructured,
    SelectiveInputs,
    StructuredInputs,
)
from tests.support.recorded import beside_the_device

# A token's number and the state before it, to the state behind it and what comes of the token.
Advance = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TabledScans:
    """A StateKernel for a CPU that plays back; rows that no run has get NaN, which must not matter."""

    def convolve(self, inputs: ConvInputs, runs: torch.Tensor, joins: torch.Tensor) -> None:
        """Torch's operations do it."""

    @beside_the_device
    def delta(self, inputs: DeltaInputs, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        query, key, value, logs, beta = inputs
        share = value.shape[1] // key.shape[1]
        query, key = query.repeat_interleave(share, 1), key.repeat_interleave(share, 1)

        def advance(row: int, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held = held * logs[row].exp()[..., None]  # [heads, keys, values]
            wanted = value[row] - torch.einsum("hkv,hk->hv", held, key[row])
            held = held + torch.einsum("hk,hv->hkv", key[row], beta[row][:, None] * wanted)
            return held, torch.einsum("hkv,hk->hv", held, query[row])

        return _over(runs, state, torch.full_like(value, torch.nan), advance)

    def gated_delta(self, inputs: GatedDelta, state: torch.Tensor, runs: torch.Tensor) -> None:
        """Torch's operations do what is around the scan."""

    def gated_structured(self, inputs: GatedStructured, state: torch.Tensor, runs: torch.Tensor) -> None:
        """Torch's operations do what is around the scan."""

    @beside_the_device
    def structured(self, inputs: StructuredInputs, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        fed, logs, b, c = inputs
        share = fed.shape[1] // b.shape[1]
        b, c = b.repeat_interleave(share, 1), c.repeat_interleave(share, 1)

        def advance(row: int, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held = held * logs[row].exp()[:, None, None] + torch.einsum("hd,hs->hds", fed[row], b[row])
            return held, torch.einsum("hds,hs->hd", held, c[row])

        return _over(runs, state, torch.full_like(fed, torch.nan), advance)

    @beside_the_device
    def selective(self, inputs: SelectiveInputs, state: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        given, steps, rates, b, c = inputs

        def advance(row: int, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held = held * torch.exp(steps[row][:, None] * rates)  # [channels, size]
            held = held + torch.outer(steps[row] * given[row], b[row])
            return held, held @ c[row]

        return _over(runs, state, torch.full_like(given, torch.nan), advance)


def _over(runs: torch.Tensor, state: torch.Tensor, output: torch.Tensor, advance: Advance) -> torch.Tensor:
    for slot, first, count, taken in runs.T.tolist():
        if slot < 0:
            continue
        held = state[slot].clone()
        for place in range(count):
            if place == taken:
                state[slot] = held
            held, output[first + place] = advance(first + place, held)
        if taken == count:
            state[slot] = held
    return output
