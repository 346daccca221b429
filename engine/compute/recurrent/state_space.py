"""The token-mixing parts of state-space layers over a packed row in which each sequence continues its slot.

Sequences of one token go together, longer runs one by one. Sums and decays are float32 whatever the model's
dtype is. Written against the layers' weights alone, since what transformers' own layers do with several
tokens and a state that is not empty differs from layer to layer and from version to version.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compute.recurrent.slot_states import LayerSlots, put, take

# Tokens that a run advances by at once. A selective scan keeps the states of all of them, which had better
# stay in the cache; a structured one does work that grows with their square, in fewer and larger operations.
_SELECTIVE_BLOCK = 16
_STRUCTURED_BLOCK = 64


def convolve(inputs: Tensor, conv: Any, slots: LayerSlots) -> Tensor:
    """The causal depthwise convolution `conv` of each sequence's own inputs: [N, channels] to the same."""
    step, output = slots.step, torch.empty_like(inputs)
    if step.num_singles:
        kept = take(slots.conv, step.single_slots)  # [n, channels, width]
        window = torch.cat([kept, take(inputs, step.single_rows)[:, :, None]], dim=2)
        products = window.float() * conv.weight[:, 0].float()
        mixed = products.sum(2) if conv.bias is None else products.sum(2) + conv.bias.float()
        put(output, step.single_rows, mixed.to(inputs.dtype))
        put(slots.conv, step.single_slots, window[:, :, 1:])
    for rows, slot in step.runs:
        fresh = inputs[rows].T  # [channels, tokens]
        window = torch.cat([slots.conv[slot], fresh], dim=1)
        output[rows] = F.conv1d(window[None], conv.weight, conv.bias, groups=len(fresh))[0].T
        slots.conv[slot] = window[:, fresh.shape[1] :]
    return output


def selective_scan(
    inputs: Tensor, steps: Tensor, rates: Tensor, gates: tuple[Tensor, Tensor], slots: LayerSlots
) -> Tensor:
    """h = exp(steps * rates) h + steps * inputs B, y = C h, with a rate for each channel and state.

    `inputs` and `steps` are [N, channels], `rates` [channels, state] and negative, `gates` are B and C, each
    [N, state]; all float32. Gives [N, channels]. Gu & Dao, "Mamba", 2023.
    """
    step, (b, c), output = slots.step, gates, torch.empty_like(inputs)
    fed = steps * inputs  # [N, channels]
    if step.num_singles:
        rows = step.single_rows
        state = take(slots.state, step.single_slots)  # [n, channels, state]
        state.mul_(torch.exp(take(steps, rows)[:, :, None] * rates))
        state.addcmul_(take(fed, rows)[:, :, None], take(b, rows)[:, None, :])
        put(output, rows, torch.bmm(state, take(c, rows)[:, :, None])[:, :, 0])
        put(slots.state, step.single_slots, state)
    for rows, slot in step.runs:
        state = slots.state[slot]  # [channels, state]
        for first in range(rows.start, rows.stop, _SELECTIVE_BLOCK):
            block = slice(first, min(first + _SELECTIVE_BLOCK, rows.stop))
            decays = torch.exp(steps[block, :, None] * rates)  # [tokens, channels, state]
            states = fed[block, :, None] * b[block, None, :]  # what each token adds; then its state
            for decay, token_state in zip(decays, states, strict=True):
                state = token_state.addcmul_(decay, state)
            output[block] = torch.bmm(states, c[block, :, None])[:, :, 0]
        slots.state[slot] = state
    return output


def structured_scan(
    inputs: Tensor, steps: Tensor, rates: Tensor, gates: tuple[Tensor, Tensor], slots: LayerSlots
) -> Tensor:
    """The same recurrence with one rate for each head, so that a block of tokens is a few matrix products.

    `inputs` are [N, heads, dim], `steps` [N, heads], `rates` [heads] and negative, `gates` are B and C, each
    [N, groups, state], shared by the heads of a group; all float32. Gives [N, heads, dim]. Dao & Gu,
    "Transformers are SSMs", 2024.
    """
    step, (b, c), output = slots.step, gates, torch.empty_like(inputs)
    logs = steps * rates  # [N, heads]
    fed = steps[:, :, None] * inputs  # [N, heads, dim]
    if step.num_singles:
        rows, (num_groups, size) = step.single_rows, b.shape[1:]
        state = take(slots.state, step.single_slots)  # [n, heads, dim, state]
        state.mul_(torch.exp(take(logs, rows))[:, :, None, None])
        grouped = state.view(len(state), num_groups, -1, size)  # [n, groups, heads of each * dim, state]
        grouped.addcmul_(take(fed, rows).reshape(len(state), num_groups, -1, 1), take(b, rows)[:, :, None, :])
        mixed = torch.matmul(grouped, take(c, rows)[:, :, :, None])
        put(output, rows, mixed.view(len(state), *inputs.shape[1:]))
        put(slots.state, step.single_slots, state)
    for rows, slot in step.runs:
        for first in range(rows.start, rows.stop, _STRUCTURED_BLOCK):
            block = slice(first, min(first + _STRUCTURED_BLOCK, rows.stop))
            output[block] = _structured_block(
                fed[block], logs[block], (b[block], c[block]), slots.state[slot]
            )
    return output


def _structured_block(fed: Tensor, logs: Tensor, gates: tuple[Tensor, Tensor], state: Tensor) -> Tensor:
    """One block of one sequence, [tokens, heads, dim]; advances `state` [heads, dim, state] in place."""
    b, c = (gate.transpose(0, 1) for gate in gates)  # [groups, tokens, state]
    num_tokens, num_heads, dim = fed.shape
    num_groups, _, size = b.shape
    # Differences of long sums: doubles, or a weak decay after strong ones would lose its digits.
    sums = logs.double().cumsum(0)  # [tokens, heads]
    spans = (sums[:, None] - sums[None]).permute(2, 0, 1)  # [heads, to, from]
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=fed.device).triu_(1)
    decays = spans.masked_fill(later, float("-inf")).exp().float()
    scores = torch.bmm(c, b.transpose(1, 2))  # [groups, to, from]
    weights = decays.view(num_groups, -1, num_tokens, num_tokens) * scores[:, None]
    values = fed.transpose(0, 1)  # [heads, tokens, dim]
    output = torch.bmm(weights.view(num_heads, num_tokens, num_tokens), values)
    grouped = state.view(num_groups, -1, size)  # [groups, heads of each * dim, state]
    recalled = torch.bmm(c, grouped.transpose(1, 2)).view(num_groups, num_tokens, -1, dim)
    recalled = recalled.transpose(1, 2).reshape(num_heads, num_tokens, dim)
    output.addcmul_(sums.exp().float().T[:, :, None], recalled)
    left = (sums[-1] - sums).exp().float().T[:, :, None]  # [heads, tokens, 1]
    added = torch.bmm((values * left).transpose(1, 2).reshape(num_groups, -1, num_tokens), b)
    state.mul_(sums[-1].exp().float()[:, None, None]).add_(added.view_as(state))
    return output.transpose(0, 1)
