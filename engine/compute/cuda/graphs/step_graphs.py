"""StepGraphs: every step that is small enough as a recording that is replayed, one for each GraphShape.

A small step takes the device less time than it takes the host to queue its operations one by one. CUDA graphs
queue them all at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from config.units import rough_size
from engine.compute.attention import AttentionBackend, StepAttention
from engine.compute.attention.context import context_over
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.device_ints import DeviceInts
from engine.compute.cuda.graphs.device_pass import AnyForward, DevicePass, TokenMemory
from engine.compute.cuda.graphs.graph_shapes import GraphShape, cheapest_first, graph_shapes, shape_for
from engine.compute.cuda.graphs.recorded_step import (
    GraphMemory,
    RecordedStep,
    bucket_of,
    other_words,
)
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_work import HeadShape, Workforce
from engine.compute.loading.coded_weights import most_expanded_bytes
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.device import is_out_of_memory
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.memory_gauge import gauge_of
from engine.compute.runner.pass_memory import PassMemory, PassRoom
from engine.plan.step_records import Int64, StepInputs

log = logging.getLogger("slipstream.model")

BYTES_OF_A_GRAPH = 16 << 20  # of the driver's own, for some thousand kernels


class GraphLimits(NamedTuple):
    """The most that steps have of what recordings depend on. `max_draft_tokens` is 0 without drafts.

    Steps that read prompts are recorded up to `max_tokens`; 0: not at all.
    """

    max_num_seqs: int
    max_blocks: int  # of one sequence
    max_draft_tokens: int = 0
    keeps_features: bool = False
    max_tokens: int = 0

    def shapes(self) -> list[GraphShape]:
        """What to record, the largest first."""
        return graph_shapes(self.max_num_seqs, self.max_draft_tokens, self.max_tokens)


@runtime_checkable
class TabledAttention(AttentionBackend, Protocol):
    """An AttentionBackend whose steps read their tables when they are carried out, not when they are made."""

    def workforce(self, kv: KvTensors) -> Workforce:
        """The processors that the work is divided among."""
        ...

    def step(self, tables: StepTables, kv: KvTensors) -> StepAttention:
        """A step over tables that the caller fills."""
        ...


class Replayed(NamedTuple):
    """What a pass gave, as a model's output has it."""

    logits: torch.Tensor  # [1, places, vocab]


class Replay(nn.Module):
    """A pass that is replayed; a module, so that it can be hooked as a call of the model can."""

    def forward(self, step: RecordedStep) -> Replayed:
        """The logits of every place."""
        step.replay()
        return Replayed(step.logits[None])


class _Probe(NamedTuple):
    """What a pass of one token has shown."""

    head_shapes: tuple[HeadShape, ...]
    logits: torch.Tensor  # [1, vocab]
    hidden: torch.Tensor | None  # [1, hidden]


class StepGraphs:
    """Records steps over `memory` and replays them; none before `record`. For the model's thread."""

    def __init__(
        self, forward: AnyForward, memory: PassMemory, tokens: TokenMemory, limits: GraphLimits
    ) -> None:
        self._forward = forward
        self._carried = memory
        self._kv = memory.kv
        self._tokens = tokens
        self._limits = limits
        self._steps: dict[GraphShape, RecordedStep] = {}  # the cheapest first
        self.module = Replay()

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Those recorded."""
        return tuple(self._steps)

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Record all shapes that memory allows. What cannot be recorded runs as before; the log says why."""
        backend = self._forward.backend
        if not isinstance(backend, TabledAttention):
            log.warning("Steps are not recorded as CUDA graphs: this attention takes no tables")
            return
        gauge = gauge_of(self._kv.device)
        free = 0 if gauge is None else gauge.free_and_total()[0]
        started = time.perf_counter()
        try:
            self._record(backend, recorder)
        except Exception as error:  # whatever a model does that cannot be recorded
            if is_out_of_memory(error):
                reason = "out of memory"
            else:
                self._steps.clear()  # what fails for one shape is wrong with the model
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("%d kinds of steps are CUDA graphs, no more: %s", len(self._steps), reason)
            return
        finally:
            self._steps = {shape: self._steps[shape] for shape in cheapest_first(self._steps)}
        seconds = time.perf_counter() - started
        log.info("recorded %d kinds of steps as CUDA graphs in %.1f s", len(self._steps), seconds)
        if gauge is not None:
            foreseen = rough_size(graph_bytes(self._forward.loaded, self._limits))
            taken = rough_size(max(0, free - gauge.free_and_total()[0]))
            log.info("they take %s of memory; %s are set aside for them", taken, foreseen)

    def start(self, inputs: StepInputs, previous: Int64 | None) -> DevicePass | None:
        """Queue the pass, as EagerPasses does; None for a step that no recording holds."""
        step = self.recorded(inputs)
        if step is None:
            return None
        step.fill(inputs, previous)
        self.module(step)
        return step.as_pass(inputs)

    def recorded(self, inputs: StepInputs) -> RecordedStep | None:
        """The recording that holds the step, to be filled; None if none does. `module` replays it."""
        shape = shape_for(inputs, self._steps, self._carried.num_again(inputs))
        return None if shape is None else self._steps[shape]

    def _record(self, backend: TabledAttention, recorder: Recorder) -> None:
        probe = self._probe(backend)
        shapes = self._limits.shapes()
        workforce = backend.workforce(self._kv)
        tables = [
            StepTables(self._kv.device, workforce, bucket_of(shape, self._limits.max_blocks))
            for shape in shapes
        ]
        memory = self._memory(probe, shapes, tables)
        for shape, own in zip(shapes, tables, strict=True):
            own.reserve(probe.head_shapes, other_words(shape, self._carried), memory.words)
            attention = backend.step(own, self._kv)
            step = RecordedStep(own, attention, self._forward, self._carried, memory, shape)
            step.record(recorder)
            self._steps[shape] = step

    def _memory(
        self, probe: _Probe, shapes: Sequence[GraphShape], tables: Sequence[StepTables]
    ) -> GraphMemory:
        """Room for the largest of the shapes."""
        num_places = max(shape.num_places for shape in shapes)
        num_tokens = max(shape.num_tokens for shape in shapes)
        num_words = max(
            own.room(probe.head_shapes, other_words(shape, self._carried))
            for shape, own in zip(shapes, tables, strict=True)
        )
        return GraphMemory(
            words=torch.empty(num_words, dtype=torch.int32, device=self._kv.device),
            tokens=self._tokens,
            logits=probe.logits.new_zeros((num_places, probe.logits.shape[1])),
            hidden=None
            if probe.hidden is None
            else probe.hidden.new_zeros((num_tokens, probe.hidden.shape[1])),
        )

    def _probe(self, backend: TabledAttention) -> _Probe:
        """Compute one token beside what is served."""
        scratch = self._carried.scratch()
        kv, room = scratch.kv, PassRoom(1, 1)
        inputs = pack_step([Part([0], 0, 1, [0])], kv.block_size)
        inputs = replace(inputs, state_slots=np.zeros(1, np.int32))
        tables = StepTables(kv.device, backend.workforce(kv))
        tables.fill(inputs)
        arrays = DeviceInts(scratch.words(room), kv.device)
        arrays.put(scratch.fill(inputs, room))
        context = scratch.recorded(context_over(backend.step(tables, kv), kv), arrays.views, room)
        token = torch.zeros(1, dtype=torch.long, device=kv.device)

        def compute() -> torch.Tensor:
            return self._forward.compute(token, token, context)

        hidden = None
        if self._limits.keeps_features:
            logits, hidden = self._forward.keeping_features(compute)
        else:
            logits = compute()
        return _Probe(tables.shapes, logits, hidden)


def graph_bytes(loaded: LoadedModel, limits: GraphLimits) -> int:
    """About what recordings take of the device's memory: to be left free when K/V is given the rest."""
    shapes = limits.shapes()
    num_places = max(shape.num_places for shape in shapes)
    tables = num_places * limits.max_blocks * 4
    logits = 3 * num_places * loaded.vocab_size * loaded.dtype.itemsize  # the model's, ours, the draw's
    numbers = most_expanded_bytes(loaded.model, loaded.dtype)
    return 2 * len(shapes) * BYTES_OF_A_GRAPH + tables + logits + numbers
