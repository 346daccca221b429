"""The bare model: the served model's own forward pass on fixed inputs, with no scheduler around it.

Works on the runner of a loaded engine, so that both sides run the same weights in the same memory through the
same attention backend. Every method is for the engine's target thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, LayerCall
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.runner.thread_follower import ThreadFollower
from engine.loop.engine_parts import StepRunner
from engine.plan.step_records import StepInputs


def fill_kv(kv: KvTensors) -> None:
    """Write all of it: memory that was never written would be read from one page, much too fast."""
    for tensor in kv.tensors:
        tensor.fill_(0.01)


def model_runner(runner: StepRunner) -> ModelRunner:
    """The model's own runner, with all threads again, whatever an engine has put around it."""
    if isinstance(runner, ThreadFollower):
        runner.team.limit(runner.team.size)
        runner = runner.runner
    assert isinstance(runner, ModelRunner)
    return runner


class BareModel:
    """One step, prepared once, to be repeated as often as wanted.

    The step's tensors and its attention context are built here and not timed; K/V lives in tensors of its
    own, filled by a real prefill.
    """

    def __init__(
        self,
        runner: StepRunner,
        token_ids: Sequence[int],
        num_sequences: int,
        first: int,
        stop: int,
        *,
        real_kv: bool = True,
    ):
        """Every sequence computes its tokens [first, stop); `token_ids` are drawn from, to have some.

        Without `real_kv` what lies before is constants, as fast to read and sooner there.
        """
        # The one place outside the runner that takes its parts: a benchmark of what is around the model needs
        # the model alone, and nothing that serves does.
        self._runner = runner = model_runner(runner)
        self._forward = runner.forward
        block_size = runner.kv.block_size
        blocks = -(-stop // block_size)  # of each sequence
        rng = random.Random(0)
        parts = [
            Part(rng.choices(token_ids, k=stop), first, stop, range(row * blocks, (row + 1) * blocks))
            for row in range(num_sequences)
        ]
        self._kv = self._forward.make_kv(num_sequences * blocks, block_size)
        if real_kv:
            self._fill(parts)
        else:
            fill_kv(self._kv)
        self.inputs = pack_step(parts, block_size)
        self._arguments = model_arguments(self.inputs, self._kv, runner)

    @torch.inference_mode()
    def _fill(self, parts: Sequence[Part]) -> None:
        """Compute the K/V of what lies before the step, one sequence a pass."""
        for part in parts:
            if part.first > 0:
                before = part._replace(first=0, stop=part.first)
                self._forward(pack_step([before], self._kv.block_size), self._kv)

    @torch.inference_mode()
    def step_s(self, num_steps: int) -> float:
        """Mean seconds of a step over a tight loop: forward, and the likeliest token of each sequence."""
        model = self._forward.loaded.model
        started = perf_counter()
        for _ in range(num_steps):
            model(**self._arguments).logits[0].argmax(-1).tolist()
        return (perf_counter() - started) / num_steps

    @torch.inference_mode()
    def attention_s(self, num_steps: int) -> float:
        """Mean seconds of a step's attention alone: laid out, K/V written and attended to, in every layer.

        Of noise as wide as the model's own; kernels that compute whole layers do the same in there.
        """
        loaded, num_tokens = self._forward.loaded, len(self.inputs.token_ids)
        calls = []
        for number, layer in enumerate(loaded.layers):
            heads = layer.num_kv_heads
            shapes = (
                (loaded.config.num_attention_heads, layer.key_dim),
                (heads, layer.key_dim),
                (heads, layer.value_dim),
            )
            noise = [torch.randn(num_tokens, *shape).to(loaded.dtype) for shape in shapes]
            calls.append((noise, LayerCall(number, layer.key_dim**-0.5, layer.window)))
        started = perf_counter()
        for _ in range(num_steps):
            context = AttentionContext(self.inputs, self._kv, self._forward.backend)
            for (query, key, value), call in calls:
                context.attend(query, key, value, call)
        return (perf_counter() - started) / num_steps

    def runner_step_s(self, num_steps: int) -> float:
        """The same step through the runner and its sampler, arrays to tokens: what the engine's thread does.

        Runs in the engine's own K/V blocks, so only while no request is open.
        """
        started = perf_counter()
        for _ in range(num_steps):
            self._runner.run(self.inputs)
        return (perf_counter() - started) / num_steps


def model_arguments(inputs: StepInputs, kv: KvTensors, runner: ModelRunner) -> dict[str, Any]:
    """What the forward pass of this step takes, as tensors on the device."""
    forward = runner.forward
    device = forward.loaded.device
    return {
        "input_ids": torch.tensor(inputs.token_ids, device=device)[None],
        "position_ids": torch.tensor(inputs.positions, device=device)[None],
        "use_cache": False,
        "logits_to_keep": torch.tensor(inputs.logits_rows, device=device),
        CONTEXT_KEYWORD: AttentionContext(inputs, kv, forward.backend),
    }
