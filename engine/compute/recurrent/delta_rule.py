"""The gated delta rule: a state is told what it recalls wrong of a key, not only what is new.

Yang et al., "Gated Delta Networks", 2024, and with a decay for each channel "Kimi Linear", 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import ScanBlock
from engine.compute.recurrent.state_kernel import DeltaInputs, GatedDelta
from engine.compute.recurrent.state_space import decay_sums, decays_between, scan

_BLOCK = 64
_CHANNEL_BLOCK = 16  # keeps the decays of all pairs of tokens in all channels


def delta_scan(inputs: DeltaInputs, slots: LayerSlots) -> Tensor:
    """h = exp(logs) h, h += key beta (value - key h), y = query h: [M, heads, value_dim]."""
    if slots.kernel is not None:
        output = slots.kernel.delta(inputs, slots.state, slots.step.runs)
        if output is not None:
            return output
    inputs = inputs._replace(value=inputs.value.float())
    each = inputs.value.shape[1] // inputs.key.shape[1]
    if each > 1:
        query, key = (part.repeat_interleave(each, 1) for part in (inputs.query, inputs.key))
        inputs = inputs._replace(query=query, key=key)
    size = _BLOCK if inputs.logs.shape[-1] == 1 else _CHANNEL_BLOCK
    return scan(inputs, slots, size, torch.empty_like(inputs.value), _delta_block)


def unit_keys(rows: Tensor) -> Tensor:
    """Of length 1, as all of these layers' kernels make queries and keys."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(inputs: GatedDelta, slots: LayerSlots) -> Tensor | None:
    """See StateKernel; None where no kernel does it."""
    kernel = slots.kernel
    return None if kernel is None else kernel.gated_delta(inputs, slots.state, slots.step.runs)


def _delta_block(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
    """What each token corrects depends on those before: a triangular system in place of a loop."""
    if block.shape[1] == 1 and block.taken is None:
        return _delta_token(parts, state)
    query, key, value, logs, beta = parts
    if block.valid is not None:
        beta = beta.masked_fill(~block.valid[:, :, None], 0.0)
    sums, total, left = decay_sums(logs, block)  # [n, heads, T or 1, 1 or key_dim]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))  # [n, heads, T, dim]
    beta = beta.transpose(1, 2)[..., None]  # [n, heads, T, 1]
    decays, decayed = decays_between(sums), sums.exp().float()
    system = (_products(key, key, decays) * beta).tril_(-1)
    recalled = torch.matmul(key * decayed, state)
    corrections = torch.linalg.solve_triangular(
        system, beta * (value - recalled), upper=False, unitriangular=True
    )  # [n, heads, T, value_dim]
    output = torch.matmul(query * decayed, state)
    output += torch.matmul(_products(query, key, decays), corrections)
    state = state * total.exp().transpose(2, 3) + torch.matmul((key * left).transpose(2, 3), corrections)
    return output.transpose(1, 2), state


def _delta_token(parts: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for single tokens, in place."""
    query, key, value, logs, beta = (part[:, 0] for part in parts)
    state.mul_(logs.exp()[..., None])
    recalled = torch.matmul(key[:, :, None], state)[:, :, 0]
    state.addcmul_(key[..., None], (beta[..., None] * (value - recalled))[:, :, None])
    return torch.matmul(query[:, :, None], state).transpose(1, 2), state


def _products(later: Tensor, earlier: Tensor, decays: Tensor) -> Tensor:
    """Of the rows of both, with what is left of the earlier: [n, heads, to, from], 0 for later ones."""
    if decays.shape[-1] == 1:
        return torch.matmul(later, earlier.transpose(2, 3)) * decays[..., 0]
    return torch.einsum("nhtc,nhfc,nhtfc->nhtf", later, earlier, decays)
