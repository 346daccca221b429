"""How a GPU computes rounds of drafts: all rows attend in one launch, and each step is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

import torch

from engine.compute.attention import AttentionBackend, choose_backend
from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from engine.compute.cuda.graphs.recorder import CudaRecorder, Recorder
from engine.compute.cuda.graphs.step_graphs import TabledAttention
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import EagleRound
from engine.compute.drafters.layer_chains import ChainSteps, DraftLayer, EagerSteps
from engine.compute.drafters.slab_rows import RowsTogether
from engine.compute.loading.model_files import first_line
from engine.compute.native.closeness import is_close
from engine.compute.runner.device import mark, wait_for

log = logging.getLogger("slipstream.speculation")

MakeQuick: TypeAlias = Callable[[AttentionBackend], DraftLayer | None]

_NEW_ROWS, _DRAFTS = (3, 2), 3  # of the round by which ways to compute are compared


def fastest_steps(
    steps: ChainSteps, kv: EagleKv, width: int, make_quick: MakeQuick | None = None
) -> ChainSteps:
    """What computes as `steps` do over `kv`, from features of so many numbers, in the fastest way there is.

    Only where the device's attention is Triton's; else it is `steps`. `make_quick` gives their layer made of
    kernels, as far as that is possible. `kv` is empty before and after.
    """
    device = kv.keys.device
    backend = choose_backend(device, layers=kv.tensors.layers)
    if not isinstance(backend, TabledAttention):
        return steps
    layers = [] if make_quick is None else _quick(make_quick, backend)
    return find_steps(steps, kv, width, backend, CudaRecorder(device), layers)


def _quick(make_quick: MakeQuick, backend: AttentionBackend) -> list[DraftLayer]:
    try:
        made = make_quick(backend)
    except Exception as error:  # whatever a compiler or a driver may raise
        log.warning("The layer that drafts is not fused: %s", first_line(error))
        return []
    return [] if made is None else [made]


@torch.inference_mode()
def find_steps(
    steps: ChainSteps,
    kv: EagleKv,
    width: int,
    backend: TabledAttention,
    recorder: Recorder,
    layers: Sequence[DraftLayer] = (),
) -> ChainSteps:
    """The fastest that computes alike: recorded, or with rows that attend together, or `steps` themselves.

    Tried with `layers` in place of their own, and then with that. The log says why it is none of the first.
    """
    work, found, expected = _sample(kv, width), steps, None
    for layer in (*layers, steps.layer):
        together = EagerSteps(layer, partial(RowsTogether, backend, kv), steps.num_guesses)
        try:
            expected = expected or _computed(steps, work)  # what fails here fails each draft, and no start
            of_operations = _computed(together, work)
            if not _are_close(of_operations, expected):
                raise RuntimeError("rows that attend together are computed otherwise")
            found = together if found is steps else found
            found = _recorded(together, kv, backend, recorder, work, of_operations)
            break
        except Exception as error:  # whatever a compiler, a driver or a model's code may raise
            log.warning("Rounds of drafts are not CUDA graphs: %s", first_line(error))
    for tensor in kv.tensors.tensors:
        tensor[: len(work.slabs)].zero_()
    wait_for(mark(kv.keys.device))  # drafts are computed in another stream
    return found


def _recorded(
    eager: EagerSteps,
    kv: EagleKv,
    backend: TabledAttention,
    recorder: Recorder,
    work: EagleRound,
    expected: list[torch.Tensor],
) -> RecordedSteps:
    """What `eager` computes, as recordings. Raises what keeps these from being made, or right."""
    recorded = RecordedSteps(eager, kv)
    began = perf_counter()
    recorded.record(backend, recorder, work.features[:1])
    if not _are_close(_computed(recorded, work), expected):
        raise RuntimeError("replayed, they are computed otherwise")
    kinds, seconds = len(recorded.sizes), perf_counter() - began
    log.info("recorded %d kinds of rounds of drafts as CUDA graphs in %.1f s", kinds, seconds)
    return recorded


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
