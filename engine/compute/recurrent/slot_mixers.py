"""The recurrent layers of a transformers model, made to continue the slots of a packed pass.

A layer's own weights, norms and projections stay in use; only how tokens meet is ours. Without a pass under
way a layer computes what transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.compute.recurrent.slot_states import LayerSlots, LayerState, SlotStates, SlotStep
from engine.compute.recurrent.state_space import convolve, selective_scan, structured_scan


class SlotMixer(nn.Module):
    """Stands in a block where transformers' layer `inner` was."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.slots: LayerSlots | None = None  # of the pass under way
        self._mix = _KINDS[type(inner).__name__].mix

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, N, hidden] to the same. In a pass, what transformers passes besides is not needed."""
        if self.slots is None:
            output: Tensor = self.inner(hidden_states, *args, **kwargs)
            return output
        return self._mix(self.inner, hidden_states[0], self.slots)[None]


def read_layer_states(model: nn.Module) -> tuple[LayerState, ...]:
    """What each recurrent layer keeps, in order of `layer_idx`; empty for a model that only attends."""
    found = [_KINDS[type(layer).__name__].state(layer) for layer in _layers(model).values()]
    return tuple(sorted(found, key=lambda state: state.layer_idx))


def install_mixers(model: nn.Module) -> dict[int, SlotMixer]:
    """Put a SlotMixer into each recurrent layer's place, unless one is there; by `layer_idx`."""
    mixers: dict[int, SlotMixer] = {}
    for name, layer in _layers(model).items():
        parent, _, attribute = name.rpartition(".")
        block = model.get_submodule(parent)
        if not isinstance(block, SlotMixer):
            setattr(block, attribute, SlotMixer(layer))
            block = getattr(block, attribute)
        mixers[int(layer.layer_idx)] = block  # type: ignore[arg-type]  # transformers' layers have one
    return mixers


@contextmanager
def continuing(mixers: dict[int, SlotMixer], states: SlotStates, step: SlotStep) -> Iterator[None]:
    """For the length of the block, `mixers` continue the slots that `step` names."""
    try:
        for index, mixer in mixers.items():
            mixer.slots = LayerSlots(step, states.conv[index], states.state[index])
        yield
    finally:
        for mixer in mixers.values():
            mixer.slots = None


class _Kind(NamedTuple):
    """How a class of layers mixes [N, hidden] to [N, hidden], and what it keeps."""

    mix: Callable[[Any, Tensor, LayerSlots], Tensor]
    state: Callable[[Any], LayerState]


def _mix_mamba(layer: Any, hidden: Tensor, slots: LayerSlots) -> Tensor:
    inputs, gate = layer.in_proj(hidden).chunk(2, dim=-1)  # [N, channels]
    inputs = layer.act(convolve(inputs, layer.conv1d, slots))
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    steps, b, c = layer.x_proj(inputs).split(sizes, dim=-1)
    steps = F.softplus(F.linear(steps, layer.dt_proj.weight).float() + layer.dt_proj.bias.float())
    rates = -torch.exp(layer.A_log.float())  # [channels, state]
    inputs = inputs.float()
    output = selective_scan(inputs, steps, rates, (b.float(), c.float()), slots)
    output = output.addcmul_(inputs, layer.D.float()).mul_(F.silu(gate.float()))
    mixed: Tensor = layer.out_proj(output.to(hidden.dtype))
    return mixed


def _mix_mamba2(layer: Any, hidden: Tensor, slots: LayerSlots) -> Tensor:
    sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    gate, inputs, steps = layer.in_proj(hidden).split(sizes, dim=-1)
    inputs = layer.act(convolve(inputs, layer.conv1d, slots)).float()
    shared = layer.n_groups * layer.ssm_state_size
    inputs, b, c = inputs.split([layer.intermediate_size, shared, shared], dim=-1)
    inputs = inputs.view(-1, layer.num_heads, layer.head_dim)
    b, c = (gates.reshape(-1, layer.n_groups, layer.ssm_state_size) for gates in (b, c))
    steps = F.softplus(steps.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)  # [N, heads]
    output = structured_scan(inputs, steps, -torch.exp(layer.A_log.float()), (b, c), slots)
    output = output.addcmul_(inputs, layer.D.float()[:, None]).flatten(1)
    mixed: Tensor = layer.out_proj(layer.norm(output, gate).to(hidden.dtype))
    return mixed


def _mamba_state(layer: Any) -> LayerState:
    shape = (layer.intermediate_size, layer.ssm_state_size)
    return LayerState(layer.layer_idx, layer.intermediate_size, layer.conv_kernel_size - 1, shape)


def _mamba2_state(layer: Any) -> LayerState:
    shape = (layer.num_heads, layer.head_dim, layer.ssm_state_size)
    return LayerState(layer.layer_idx, layer.conv_dim, layer.conv_kernel_size - 1, shape)


_MAMBA2 = _Kind(_mix_mamba2, _mamba2_state)
_KINDS = {
    "MambaMixer": _Kind(_mix_mamba, _mamba_state),
    "Mamba2Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
}


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Transformers' recurrent layers by name."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in _KINDS}
