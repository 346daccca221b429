"""measure_largest_step: what a model's largest steps are computed in, measured before K/V gets the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.device import is_out_of_memory
from engine.compute.runner.dummy_steps import Part, pack_step, plain_sampling
from engine.compute.runner.memory_gauge import MemoryGauge
from engine.compute.runner.scratch_pass import ScratchPass, forward_of
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused
from engine.plan.step_records import StepInputs

_TEMPERATURE = 1.0


class LargestStep(NamedTuple):
    """The most that a step has: tokens, sequences, and rows of logits, drafts' among them.

    No more rows than tokens; sequences may be more.
    """

    num_tokens: int
    num_seqs: int
    block_size: int
    num_rows: int


def measure_largest_step(
    loaded: LoadedModel, sampler: Sampler, largest: LargestStep, gauge: MemoryGauge
) -> int:
    """The most bytes that a step of all tokens and rows, and a decode step of all sequences, have at once.

    Both draw from their logits with a temperature. They run over K/V of their own, which does not count and
    is gone afterwards. On the thread that runs the model. Raises StartRefused where the memory is not there.
    """
    try:
        return max(_measure(step, loaded, sampler, largest, gauge) for step in _steps(loaded, largest))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartRefused(
            f"A step of --max-num-batched-tokens {largest.num_tokens} or --max-num-seqs {largest.num_seqs} "
            "finds no memory to be computed in beside the weights. Lower them, or take a smaller model."
        ) from error


def _measure(
    step: StepInputs, loaded: LoadedModel, sampler: Sampler, largest: LargestStep, gauge: MemoryGauge
) -> int:
    num_seqs = len(step.query_lens)
    num_blocks = int(step.block_tables.max()) + 1
    compute = ScratchPass(
        forward_of(loaded), MemorySizes(num_blocks, largest.block_size, num_seqs), loaded.kv_dtype
    )

    @torch.inference_mode()
    def work() -> None:
        sampler.sample(compute(step), step.sampling)

    return gauge.peak(work)


def _steps(loaded: LoadedModel, largest: LargestStep) -> Iterator[StepInputs]:
    """A step that reads few and long prompts, as the budget holds, and one with a token of each sequence.

    The first has as many rows of logits as any: these take the more where drafts are verified, and what the
    layers have made of all tokens is still there beside them.
    """
    longest = min(loaded.max_model_len, largest.num_tokens)
    whole, rest = divmod(largest.num_tokens, longest)
    prompts = _step([longest] * whole + [rest] * bool(rest), largest.block_size)
    rows = np.arange(largest.num_tokens - largest.num_rows, largest.num_tokens)
    sampling = plain_sampling(prompts.positions[rows] + 1, _TEMPERATURE)
    yield replace(prompts, logits_rows=rows, sampling=sampling)
    yield _step([1] * min(largest.num_seqs, largest.num_tokens), largest.block_size)


def _step(lengths: list[int], block_size: int) -> StepInputs:
    parts, first = [], 0
    for length in lengths:
        num_blocks = -(-length // block_size)
        parts.append(Part([0] * length, 0, length, range(first, first + num_blocks)))
        first += num_blocks
    return pack_step(parts, block_size, temperature=_TEMPERATURE)
