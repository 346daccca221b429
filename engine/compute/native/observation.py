"""What each module of a model was given and what it answered, in one packed pass over a few tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from engine.compute.attention import (
    AttentionBackend,
    AttentionContext,
    LayerCall,
    StepAttention,
)
from engine.compute.attention.context import HeadNorms, HeadTurns, RotatingStep
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.scratch_pass import ScratchPass, forward_of
from engine.plan.step_records import StepInputs

_BLOCK_SIZE = 3
_LENGTHS = (17, 16, 8)


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of a module."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Any

    @property
    def given(self) -> torch.Tensor | None:
        """What the module computes from; None for one that is called in an unusual way."""
        given = self.args[0] if self.args else self.options.get("hidden_states")
        return given if isinstance(given, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Observation:
    """The last call of each module that was called, by its name, and each attention layer's own call."""

    seen: dict[str, Seen]
    calls: dict[int, LayerCall]
    inputs: StepInputs
    kv: KvTensors

    def context(self, backend: AttentionBackend) -> AttentionContext:
        """The same step over empty tensors, so that an attention can be asked again."""
        kv = self.kv
        empty = KvTensors(kv.layers, kv.num_blocks, kv.block_size, kv.compute_dtype, kv.device)
        return AttentionContext(self.inputs, empty, backend)


@torch.inference_mode()
def observe(loaded: LoadedModel, names: Collection[str], block_size: int = _BLOCK_SIZE) -> Observation:
    """Run `loaded` once and keep what its modules called `names` were given and answered.

    On a device `block_size` is the one that is served, since kernels are compiled for a size.
    """
    forward = forward_of(loaded)
    calls: dict[int, LayerCall] = {}
    forward.backend = _RecordingBackend(forward.backend, calls)
    seen: dict[str, Seen] = {}
    handles = [
        loaded.model.get_submodule(name).register_forward_hook(partial(_note, seen, name), with_kwargs=True)
        for name in names
    ]
    lengths = [min(length, loaded.max_model_len) for length in _LENGTHS]
    compute = ScratchPass(forward, MemorySizes(sum(lengths), block_size, len(lengths)))
    inputs = _sample_step(lengths, loaded.vocab_size, block_size)
    try:
        compute(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return Observation(seen, calls, inputs, compute.kv)


def _note(
    seen: dict[str, Seen],
    name: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
    output: Any,
) -> None:
    seen[name] = Seen(args, options, output)


def _sample_step(lengths: Collection[int], vocab_size: int, block_size: int) -> StepInputs:
    """Sequences of these lengths from their starts, in scattered blocks."""
    generator = np.random.default_rng(0)
    free = generator.permutation(sum(lengths)).tolist()
    parts = []
    for length in lengths:
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        parts.append(Part(generator.integers(0, vocab_size, length).tolist(), 0, length, blocks))
    return pack_step(parts, block_size, every_row=True)


class _RecordingBackend:
    """Another backend, and a note of what each layer asks of it."""

    def __init__(self, backend: AttentionBackend, calls: dict[int, LayerCall]) -> None:
        self._backend = backend
        self._calls = calls

    def plan(self, inputs: StepInputs, kv: KvTensors) -> _RecordingStep:
        """See AttentionBackend."""
        return _RecordingStep(self._backend.plan(inputs, kv), self._calls)


class _RecordingStep:
    def __init__(self, step: StepAttention, calls: dict[int, LayerCall]) -> None:
        self._step = step
        self._calls = calls

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""
        self._step.write(layer, key, value)

    @property
    def slots(self) -> torch.Tensor:
        """See RotatingStep."""
        return cast(RotatingStep, self._step).slots

    def rotate_and_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        turns: HeadTurns | None,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """See RotatingStep: what fused layers ask of it."""
        return cast(RotatingStep, self._step).rotate_and_write(layer, qkv, turns, norms)

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """See StepAttention."""
        self._calls[call.layer] = call
        return self._step.attend(query, call)
