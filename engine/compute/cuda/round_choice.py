"""How a GPU computes rounds of drafts: all rows attend in one launch, and each step is recorded."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter

import torch

from engine.compute.attention import choose_backend
from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from engine.compute.cuda.graphs.recorder import CudaRecorder, Recorder
from engine.compute.cuda.graphs.step_graphs import TabledAttention
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import EagleRound
from engine.compute.drafters.layer_chains import ChainSteps, EagerSteps
from engine.compute.drafters.slab_rows import RowsTogether
from engine.compute.loading.model_files import first_line
from engine.compute.native.closeness import is_close
from engine.compute.runner.device import mark, wait_for

log = logging.getLogger("slipstream.speculation")

_NEW_ROWS, _DRAFTS = (3, 2), 3  # of the round by which ways to compute are compared


def fastest_steps(steps: ChainSteps, kv: EagleKv, width: int) -> ChainSteps:
    """What computes as `steps` do over `kv`, from features of so many numbers, in the fastest way there is.

    Only where the device's attention is Triton's; else it is `steps`. `kv` is empty before and after.
    """
    device = kv.keys.device
    backend = choose_backend(device, layers=kv.tensors.layers)
    if not isinstance(backend, TabledAttention):
        return steps
    return find_steps(steps, kv, width, backend, CudaRecorder(device))


@torch.inference_mode()
def find_steps(
    steps: ChainSteps, kv: EagleKv, width: int, backend: TabledAttention, recorder: Recorder
) -> ChainSteps:
    """The fastest that computes alike: recorded, or with rows that attend together, or `steps` themselves.

    The log says why it is none of the first.
    """
    together = EagerSteps(steps.layer, partial(RowsTogether, backend, kv), steps.num_guesses)
    work = _sample(kv, width)
    found = steps
    try:
        expected = _computed(together, work)
        if not _are_close(expected, _computed(steps, work)):
            raise RuntimeError("rows that attend together are computed otherwise")
        found = together
        recorded = RecordedSteps(together, kv)
        began = perf_counter()
        recorded.record(backend, recorder, work.features[:1])
        if not _are_close(_computed(recorded, work), expected):
            raise RuntimeError("replayed, they are computed otherwise")
        found = recorded
        kinds, seconds = len(recorded.sizes), perf_counter() - began
        log.info("recorded %d kinds of rounds of drafts as CUDA graphs in %.1f s", kinds, seconds)
    except Exception as error:  # whatever a compiler, a driver or a model's code may raise
        log.warning("Rounds of drafts are not CUDA graphs: %s", first_line(error))
    for tensor in kv.tensors.tensors:
        tensor[: len(work.slabs)].zero_()
    wait_for(mark(kv.keys.device))  # drafts are computed in another stream
    return found


def _computed(steps: ChainSteps, work: EagleRound) -> list[torch.Tensor]:
    """The logits of each draft of a round, whose chains are any."""
    dtype, token_ids = work.features.dtype, steps.layer.token_ids
    told = [steps.start(work).logits.to(dtype, copy=True)]
    for count in work.drawing[1:]:
        told.append(steps.go_on(token_ids[:count]).logits.to(dtype, copy=True))
    return told


def _are_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(is_close, found, expected))


def _sample(kv: EagleKv, width: int) -> EagleRound:
    """A round of two sequences, or of one where there is room for no more."""
    rows = list(_NEW_ROWS[: kv.tensors.num_blocks])
    draw = torch.Generator().manual_seed(0)
    features = torch.randn((sum(rows), width), generator=draw).to(kv.keys)
    return EagleRound(
        features=features,
        token_ids=list(range(sum(rows))),
        positions=[place for count in rows for place in range(count)],
        num_rows=rows,
        num_kept=[0] * len(rows),
        slabs=list(range(len(rows))),
        num_drafts=list(range(_DRAFTS, _DRAFTS - len(rows), -1)),
        num_wanted=[_DRAFTS] * len(rows),
    )
