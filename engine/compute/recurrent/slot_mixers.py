"""The recurrent layers of a transformers model, made to continue the slots of a packed pass.

A layer's own weights, norms and projections stay in use; only how tokens meet is ours. Without a pass under
way a layer computes what transformers computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from engine.compute.attention.layer_places import place_in
from engine.compute.recurrent.mixer_kinds import KINDS
from engine.compute.recurrent.pass_rows import PassRows
from engine.compute.recurrent.recorded_slots import RecordedSlots
from engine.compute.recurrent.slot_states import LayerSlots, LayerState, SlotStates
from engine.compute.recurrent.slot_step import SlotStep, take
from engine.compute.recurrent.state_kernel import StateKernel


class SlotMixer(nn.Module):
    """Stands in a block where transformers' layer `inner` was."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.slots: LayerSlots | None = None  # of the pass under way
        self._kind = KINDS[type(inner).__name__]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, N, hidden] to the same. In a pass, what transformers passes besides is not needed."""
        slots, kind, inner = self.slots, self._kind, self.inner
        if slots is None:
            return inner(hidden_states, *args, **kwargs)
        rows, rest = kind.project(inner, hidden_states[0])
        own = PassRows(rows, slots)
        mixed = kind.mix(inner, own, slots)
        own.keep()
        output = kind.finish(inner, mixed if slots.step.new is None else take(mixed, slots.step.new), rest)
        return kind.give(inner, output)


def read_layer_states(model: nn.Module) -> tuple[LayerState, ...]:
    """What each recurrent layer keeps, in order of `layer_idx`; empty for a model that only attends."""
    found = [
        replace(KINDS[type(layer).__name__].state(layer), layer_idx=_index_of(name, layer))
        for name, layer in _layers(model).items()
    ]
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
        mixers[_index_of(name, layer)] = block
    return mixers


@contextmanager
def continuing(
    mixers: dict[int, SlotMixer],
    states: SlotStates,
    step: SlotStep | RecordedSlots,
    kernel: StateKernel | None = None,
) -> Iterator[None]:
    """For the length of the block, `mixers` continue the slots that `step` names, by the `kernel` if any."""
    try:
        for index, mixer in mixers.items():
            mixer.slots = LayerSlots(step, states.rows[index], states.state[index], kernel)
        yield
    finally:
        for mixer in mixers.values():
            mixer.slots = None


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Transformers' recurrent layers by name."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in KINDS}


def _index_of(name: str, layer: nn.Module) -> int:
    """The layer's place in the model; not every class tells it."""
    index: Any = getattr(layer, "layer_idx", getattr(layer, "layer_id", None))
    return place_in(name) if index is None else int(index)
