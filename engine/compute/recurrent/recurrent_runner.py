"""Runs the scheduler's steps on a recurrent or hybrid model: states in slots, K/V where it attends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.compute.attention.swap_tensors import SwapTensors
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.slot_states import HostStates
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.device import failures_named, mark, seconds_between
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.isolated_draw import draw_isolated
from engine.compute.runner.model_runner import ForDrafts
from engine.compute.runner.prompt_scorer import PromptScorer
from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verified import Verified
from engine.compute.verification.verifier import make_verifier
from engine.plan.step_records import BlockMoves, SampledRows, StepInputs, StepResult

_WARM_UP_TOKENS = 64
_NO_DRAFTS = ForDrafts()


class RecurrentRunner:
    """Owns one state slot for each running request, the paged K/V of the layers that attend, and host memory.

    A sequence can be cut back to any draft of its last step, of which there may be `max_drafts`, or before
    its last token if the step held that back, and to no other token. It may begin where a snapshot was saved,
    on a copy of another's slot, or where it was saved on the host. After a step that failed, its sequences
    must be computed again from their first tokens, or restored. Every method runs on the one thread that made
    it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sizes: MemorySizes,
        sampler: Sampler,
        for_drafts: ForDrafts = _NO_DRAFTS,
    ) -> None:
        """Of what drafters read, `for_drafts` may name layers only."""
        self.forward = RecurrentForward(loaded, for_drafts.feature_layers)
        self._sampler = sampler
        self.for_drafts = replace(for_drafts, keeps_features=bool(for_drafts.feature_layers))
        self._verifier = make_verifier(for_drafts.verification, sampler)
        self.scorer = PromptScorer(loaded)
        self.memory = StateMemory(self.forward, sizes)
        self.kv = self.memory.kv
        self.states = self.memory.states
        self._swap = SwapTensors(self.kv, sizes.num_host_blocks) if loaded.layers else None
        self._host_states = HostStates(self.states, sizes.num_host_states)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepResult:
        """One step: mix tokens, attend, draw. The seconds are of the device's own clock.

        A row that cannot be drawn is in the result's `row_errors`. Raises RewindError for trees of drafts and
        for a sequence that goes on where its slot cannot; OutOfDeviceMemory; other errors of the forward pass
        come through.
        """
        device, hidden = self.kv.device, None
        with failures_named():
            self.reserve(inputs.moves)
            start = mark(device)
            num_bytes = self.move(inputs.moves)
            begin = mark(device) if num_bytes else start
            with self.scorer.watching(inputs.prompt_rows) as seen:
                if self.for_drafts.keeps_features:
                    logits, hidden = self.forward.keeping_features(lambda: self.forward(inputs, self.memory))
                else:
                    logits = self.forward(inputs, self.memory)
            middle = mark(device)
            verified = self.judge(logits, inputs)
            parts = None if hidden is None else self.for_drafts.parts(hidden, inputs)
            scores = self.scorer.score(inputs.prompt_rows, seen)
        end = mark(device)
        return StepResult(
            verified.rows,
            seconds_between(begin, middle),
            seconds_between(middle, end),
            seconds_between(start, begin) if num_bytes else 0.0,
            num_bytes,
            features=None if parts is None else self.for_drafts.features(parts, inputs, verified),
            prompt_logprobs=scores,
        )

    def judge(self, logits: torch.Tensor, inputs: StepInputs) -> Verified:
        """Draw from the `logits` [R, vocab] and judge the drafts."""
        if not len(logits):
            return Verified(SampledRows([]))
        return draw_isolated(self._verifier, logits, inputs.sampling, inputs.drafts)

    def reserve(self, moves: BlockMoves) -> None:
        """Take the host memory that `move` will copy to: its time is no part of the swap rate."""
        self._host_states.reserve(copy.target for copy in moves.states_out)
        if self._swap is not None:
            self._swap.reserve(copy.target for copy in moves.swap_out)

    def move(self, moves: BlockMoves) -> int:
        """Blocks and states, before the pass; how many bytes went to the host or came from there."""
        self._host_states.save(moves.states_out)
        if self._swap is not None:
            self._swap.copy_out(moves.swap_out)
        self.kv.scrub_blocks(moves.scrub_blocks)
        self.kv.copy_blocks(moves.block_copies)
        self.memory.snapshots.restore(moves.state_restores)
        self.states.copy(moves.state_copies)
        if self._swap is not None:
            self._swap.copy_in(moves.swap_in)
        self._host_states.restore(moves.states_in)
        num_states = len(moves.states_out) + len(moves.states_in)
        num_blocks = len(moves.swap_out) + len(moves.swap_in)
        return num_states * self._host_states.each_bytes + num_blocks * self.kv.block_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small prefill and small decodes on scratch memory, so that the first request is not slow."""
        block_size = self.kv.block_size
        length = min(_WARM_UP_TOKENS, self.forward.loaded.max_model_len)
        num_blocks = -(-length // block_size)
        memory = StateMemory(self.forward, MemorySizes(2 * num_blocks, block_size, num_slots=2))
        blocks = (range(num_blocks), range(num_blocks, 2 * num_blocks))
        tokens = [0] * length
        single = [Part(tokens, 0, 1, blocks[slot]) for slot in range(2)]
        for step in ([Part(tokens, 0, length, blocks[0])], single, single[:1]):
            for temperature in (0.0, 1.0):
                inputs = replace(
                    pack_step(step, block_size, temperature=temperature),
                    state_slots=np.arange(len(step), dtype=np.int32),
                )
                self._sampler.sample(self.forward(inputs, memory), inputs.sampling)
