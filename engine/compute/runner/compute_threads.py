"""How many threads compute: as many as make a decode step fastest on this machine, measured at the start.

Pinning them is not among the choices: with the event loop as one more thread on the same cores it cost a
third to a half of the throughput of eight to 32 streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.scratch_pass import ScratchPass, forward_of

_TIME_LIMIT_S = 0.3  # after which no other number is tried
_ROUNDS = 3  # the fastest counts
_HOPELESS = 1.2  # times the best so far: not tried again
_CLEARLY = 0.95  # times the first: a lead of less may be chance

_NUM_SEQS = 4
_CONTEXT = 64
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """`count` threads were the fastest; `seconds` of one step by the numbers that were tried."""

    count: int
    seconds: dict[int, float]

    def __str__(self) -> str:
        """In words."""
        if not self.seconds:
            return str(self.count)
        tried = ", ".join(f"{1e3 * s:.1f} ms with {count}" for count, s in self.seconds.items())
        return f"{self.count}: a step takes {tried}"


def choose_threads(
    loaded: LoadedModel, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> ThreadChoice:
    """Try `counts`, the likeliest first, and have the best compute for the calling thread; at least one.

    Only models on the CPU are tried; others keep the first.
    """
    if loaded.device.type != "cpu" or len(counts) == 1:
        use_threads(loaded, counts[0])
        return ThreadChoice(counts[0], {})
    return fastest(_decode_step(loaded), counts, partial(use_threads, loaded), clock)


def use_threads(loaded: LoadedModel, count: int) -> None:
    """Have `count` threads compute what the calling thread runs of the model.

    Where the kernels compute all of it, torch gets one: its waiting threads would spin on the kernels' cores.
    """
    if loaded.team is not None:
        loaded.team.resize(count)
    torch.set_num_threads(count if loaded.kernels is None else 1)


@torch.inference_mode()
def fastest(
    step: Callable[[], object],
    counts: Sequence[int],
    use: Callable[[int], None],
    clock: Callable[[], float],
) -> ThreadChoice:
    """Run `step` with each of `counts` threads, and `use` the number that it was fastest with.

    The first stays unless another is clearly faster.
    """
    started = clock()
    seconds: dict[int, float] = {}
    for count in counts:
        if seconds and clock() - started > _TIME_LIMIT_S:
            break
        use(count)
        step()  # makes the threads
        seconds[count] = _best_of(step, min(seconds.values(), default=float("inf")), clock)
    first, best = counts[0], min(seconds, key=seconds.__getitem__)
    chosen = best if seconds[best] < _CLEARLY * seconds[first] else first
    use(chosen)
    return ThreadChoice(chosen, seconds)


def _best_of(step: Callable[[], object], to_beat: float, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of a few runs; of one where that is far from `to_beat`."""
    best = float("inf")
    for _ in range(_ROUNDS):
        start = clock()
        step()
        best = min(best, clock() - start)
        if best > _HOPELESS * to_beat:
            break
    return best


def _decode_step(loaded: LoadedModel) -> Callable[[], object]:
    """One token of each of a few sequences, over memory of its own; the first ones where there are states."""
    length = 1 if loaded.keeps_state else min(_CONTEXT, loaded.max_model_len)
    num_blocks = -(-length // _BLOCK_SIZE)
    compute = ScratchPass(forward_of(loaded), MemorySizes(_NUM_SEQS * num_blocks, _BLOCK_SIZE, _NUM_SEQS))
    parts = [
        Part([0] * length, length - 1, length, range(row * num_blocks, (row + 1) * num_blocks))
        for row in range(_NUM_SEQS)
    ]
    inputs = pack_step(parts, _BLOCK_SIZE)
    return lambda: compute(inputs)
