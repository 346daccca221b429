"""How the tokens of state-space layers meet, over rows in which each sequence continues its slot.

Sequences go together, in blocks of tokens. Sums and decays are float32 whatever the model's dtype is. Written
against the layers' weights alone, since what transformers' own layers do with several tokens and a state that
is not empty differs from layer to layer and from version to version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import ScanBlock, put, take
from engine.compute.recurrent.state_kernel import GatedStructured, SelectiveInputs, StructuredInputs

# Tokens that sequences advance by at once. A selective scan keeps the states of all of them, which had better
# stay in the cache; a structured one does work that grows with their square, in fewer and larger operations.
_SELECTIVE_BLOCK = 16
_STRUCTURED_BLOCK = 64

Advance = Callable[[Sequence[Tensor], ScanBlock, Tensor], tuple[Tensor, Tensor]]


def convolve(extended: Tensor, conv: Any, slots: LayerSlots) -> Tensor:
    """The causal depthwise convolution `conv` of the first columns of [X, ...]: [M, channels]."""
    step, weight = slots.step, conv.weight[:, 0].float()  # [channels, taps]
    channels, taps = weight.shape
    inputs = extended[step.conv_width + 1 - taps :, :channels].float()
    length = len(extended) - step.conv_width
    mixed = inputs[:length] * weight[:, 0]
    for tap in range(1, taps):
        mixed.addcmul_(inputs[tap : tap + length], weight[:, tap])
    if conv.bias is not None:
        mixed += conv.bias.float()
    return take(mixed, shifted(step.mixed, step.conv_width)).to(extended.dtype)


def shifted(index: slice | Tensor, by: int) -> slice | Tensor:
    """An index of rows that lie `by` rows before those of `index`."""
    return slice(index.start - by, index.stop - by) if isinstance(index, slice) else index - by


def scan(inputs: Sequence[Tensor], slots: LayerSlots, size: int, output: Tensor, advance: Advance) -> Tensor:
    """Fill `output` [M, ...] from `inputs`, each [M, ...], with blocks of `size` tokens; the slots advance.

    `advance` is given a block's inputs [n, T, ...] and states [n, ...], which it may change, and gives what
    comes of them and the new states.
    """
    for block in slots.step.blocks(size):
        state = take(slots.state, block.slots)
        mixed, state = advance([block.take(each) for each in inputs], block, state)
        block.put(output, mixed)
        put(slots.state, block.slots, state)
    return output


def selective_scan(inputs: SelectiveInputs, slots: LayerSlots) -> Tensor:
    """h = exp(steps * rates) h + steps * inputs B, y = C h, with a rate for each channel and state.

    Gives [M, channels]. Gu & Dao, "Mamba", 2023.
    """
    if slots.kernel is not None:
        output = slots.kernel.selective(inputs, slots.state, slots.step.runs)
        if output is not None:
            return output
    given, all_steps, rates, *gates = inputs

    def advance(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
        fed, steps, b, c = parts
        if block.valid is not None:
            fed, steps = (each.masked_fill(~block.valid[:, :, None], 0.0) for each in (fed, steps))
        decays = torch.exp(steps[..., None] * rates)  # [n, T, channels, state]
        states = fed[..., None] * b[:, :, None, :]  # what each token adds; then its state
        taken = run_through(decays, states, block, state)
        return torch.matmul(states, c[..., None])[..., 0], taken

    parts = (all_steps * given, all_steps, *gates)
    return scan(parts, slots, _SELECTIVE_BLOCK, torch.empty_like(given), advance)


def diagonal_scan(inputs: Tensor, decays: Tensor, slots: LayerSlots) -> Tensor:
    """h = decays h + inputs, y = h; all [M, channels] and float32. De et al., "Griffin", 2024."""

    def advance(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
        states, decays = parts[0].clone(), parts[1]
        if block.valid is not None:
            states = states.masked_fill_(~block.valid[:, :, None], 0.0)
            decays = decays.masked_fill(~block.valid[:, :, None], 1.0)
        return states, run_through(decays, states, block, state)

    return scan((inputs, decays), slots, _STRUCTURED_BLOCK, torch.empty_like(inputs), advance)


def run_through(decays: Tensor, states: Tensor, block: ScanBlock, state: Tensor) -> Tensor:
    """Make `states`, [n, T, ...] of what each token adds, the states after each; gives those to be kept."""
    kept = state
    for place in range(states.shape[1]):
        state = states[:, place].addcmul_(decays[:, place], state)
        if block.taken is None:
            kept = state
        else:
            is_taken = block.taken[:, place].view(-1, *[1] * (state.ndim - 1))
            kept = torch.where(is_taken, state, kept)
    return kept


def structured_scan(inputs: StructuredInputs, slots: LayerSlots) -> Tensor:
    """h = exp(logs) h + inputs B, y = C h: one decay for each head, so that blocks are matrix products.

    Gives [M, heads, dim]. Dao & Gu, "Transformers are SSMs", 2024.
    """
    if slots.kernel is not None:
        output = slots.kernel.structured(inputs, slots.state, slots.step.runs)
        if output is not None:
            return output
    inputs = StructuredInputs(*(each.float() for each in inputs))
    return scan(inputs, slots, _STRUCTURED_BLOCK, torch.empty_like(inputs.inputs), _structured_block)


def gated_structured(inputs: GatedStructured, slots: LayerSlots) -> Tensor | None:
    """See StateKernel; None where no kernel does it."""
    kernel = slots.kernel
    return None if kernel is None else kernel.gated_structured(inputs, slots.state, slots.step.runs)


def _structured_block(parts: Sequence[Tensor], block: ScanBlock, state: Tensor) -> tuple[Tensor, Tensor]:
    if block.shape[1] == 1 and block.taken is None:
        return _structured_token(parts, state)
    fed, logs, b, c = parts
    (count, length, num_heads, dim), (num_groups, size) = fed.shape, b.shape[2:]
    if block.valid is not None:
        fed = fed.masked_fill(~block.valid[:, :, None, None], 0.0)
    sums, total, left = decay_sums(logs, block)  # [n, heads, T], [n, heads, 1], [n, heads, T]
    values = fed.transpose(1, 2)  # [n, heads, T, dim]
    b, c = (gate.transpose(1, 2) for gate in (b, c))  # [n, groups, T, state]
    scores = torch.matmul(c, b.transpose(2, 3))  # [n, groups, to, from]
    weights = decays_between(sums).view(count, num_groups, -1, length, length) * scores[:, :, None]
    output = torch.matmul(weights.view(count, num_heads, length, length), values)
    grouped = state.view(count, num_groups, -1, size)  # [n, groups, heads of each * dim, state]
    recalled = torch.matmul(c, grouped.transpose(2, 3)).view(count, num_groups, length, -1, dim)
    recalled = recalled.transpose(2, 3).reshape(count, num_heads, length, dim)
    output.addcmul_(sums.exp().float()[..., None], recalled)
    remaining = (values * left[..., None]).transpose(2, 3).reshape(count, num_groups, -1, length)
    state = state * total.exp()[..., None] + torch.matmul(remaining, b).view_as(state)
    return output.transpose(1, 2), state


def _structured_token(parts: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for single tokens, in place."""
    fed, logs, b, c = (part[:, 0] for part in parts)
    num_groups, size = b.shape[1:]
    state.mul_(torch.exp(logs)[:, :, None, None])
    grouped = state.view(len(state), num_groups, -1, size)  # [n, groups, heads of each * dim, state]
    grouped.addcmul_(fed.reshape(len(state), num_groups, -1, 1), b[:, :, None, :])
    mixed = torch.matmul(grouped, c[:, :, :, None])
    return mixed.view(len(state), 1, *fed.shape[1:]), state


def decay_sums(logs: Tensor, block: ScanBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Of [n, T, heads ...]: the sums of logs up to each token, what a state is decayed by in the whole block,
    and each token's part by then, 0 for those that it does not take in. [n, heads, T ...], [n, heads, 1 ...].

    The sums are doubles: of their differences a weak decay after strong ones would lose its digits.
    """
    logs = logs.transpose(1, 2)
    shape = (len(logs), 1, -1, *[1] * (logs.ndim - 3))
    if block.valid is not None:
        logs = logs.masked_fill(~block.valid.view(shape), 0.0)
    sums = logs.double().cumsum(2)
    if block.taken is None:
        total = sums[:, :, -1:]
        return sums, total.float(), (total - sums).exp().float()
    taken = block.taken.view(shape)
    total = logs.double().masked_fill(~taken, 0.0).sum(2, keepdim=True)
    return sums, total.float(), (total - sums).masked_fill(~taken, -torch.inf).exp().float()


def decays_between(sums: Tensor) -> Tensor:
    """How much of an earlier token is left at a later one: [n, heads, T ...] to [n, heads, to, from ...]."""
    length = sums.shape[2]
    spans = sums[:, :, :, None] - sums[:, :, None]
    later = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu_(1)
    later = later.view(length, length, *[1] * (sums.ndim - 3))
    return spans.masked_fill_(later, -torch.inf).exp_().float()
