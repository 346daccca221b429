"""StepProfile: what steps of a few sizes take on this machine, measured before the first request.

Without it the first requests pay for finding out: drafts are verified by fours while costs are unknown, and a
stall in a first observation is taken for a cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import StepInputs, StepResult

_CONTEXT = 64  # tokens before those that are measured
_TIME_LIMIT_S = 1.0  # after which nothing more is begun
_ROUNDS = 2  # the faster counts
_CHUNK = 64  # prompt tokens
_NUM_SEQS = 8
_NUM_DRAFTS = (4, 8, 16, 32)  # of one sequence
_NUM_DRAFTS_EACH = 4  # of several


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was measured; sizes that did not fit, or for which there was no time, are missing.

    `decodes` are (sequences, tokens, seconds), drafts among the tokens; `chunk` is (prompt tokens, seconds).
    """

    decodes: tuple[tuple[int, int, float], ...] = ()
    chunk: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """What the steps may use: whole blocks from the first on, and as many tokens of a sequence."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_draft_tokens: int = 0


def profile_steps(run: Callable[[StepInputs], StepResult], limits: ProfileLimits) -> StepProfile:
    """Run dummy steps over K/V that is not in use yet, the commonest first; on the runner's thread.

    A chunk comes before drafts: without its price the first prompts beside a stream are one long step for it.
    """
    ends = time.perf_counter() + _TIME_LIMIT_S
    several = min(_NUM_SEQS, limits.max_num_seqs)
    drafted = [(1, count) for count in _NUM_DRAFTS] + [(several, _NUM_DRAFTS_EACH)]
    decodes = _decodes(run, [(1, 0), (several, 0)], limits, ends)
    chunk = None
    stop = min(_CHUNK, limits.max_model_len, limits.num_blocks * limits.block_size)
    if stop > 1 and time.perf_counter() < ends:
        blocks = range(-(-stop // limits.block_size))
        whole = pack_step([Part([0] * stop, 0, stop, blocks)], limits.block_size)
        chunk = stop, _seconds(run, whole)
    fitting = [size for size in drafted if size[1] <= limits.max_draft_tokens]
    return StepProfile((*decodes, *_decodes(run, fitting, limits, ends)), chunk)


def _decodes(
    run: Callable[[StepInputs], StepResult],
    sizes: Sequence[tuple[int, int]],
    limits: ProfileLimits,
    ends: float,
) -> list[tuple[int, int, float]]:
    """As StepProfile's, of `sizes` of (sequences, drafts of each), as far as there is time until `ends`."""
    measured = []
    for num_seqs, num_drafts in dict.fromkeys(sizes):
        step = _step(num_seqs, num_drafts, limits)
        if step is not None and time.perf_counter() < ends:
            measured.append((num_seqs, num_seqs * (1 + num_drafts), _seconds(run, step)))
    return measured


def _step(num_seqs: int, num_drafts: int, limits: ProfileLimits) -> StepInputs | None:
    """Each sequence's newest token and its drafts behind a context; None where there is no room."""
    first = min(_CONTEXT, limits.max_model_len - 1 - num_drafts)
    stop = first + 1 + num_drafts
    num_blocks = -(-stop // limits.block_size)
    if first < 0 or num_seqs * num_blocks > limits.num_blocks:
        return None
    parents = range(-1, num_drafts - 1)
    parts = [
        Part([0] * stop, first, stop, range(row * num_blocks, (row + 1) * num_blocks), parents)
        for row in range(num_seqs)
    ]
    step = pack_step(parts, limits.block_size)
    if step.drafts is None:
        return step
    return replace(step, drafts=replace(step.drafts, parents=None))  # chains


def _seconds(run: Callable[[StepInputs], StepResult], step: StepInputs) -> float:
    results = [run(step) for _ in range(_ROUNDS)]
    return min(result.forward_s + result.sample_s for result in results)
