"""Running tiny recurrent and hybrid models in the tests: by hand, or driven by the real batcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part, pack_step, plain_sampling
from engine.compute.runner.model_runner import ForDrafts
from engine.compute.sampling.sampler import Sampler
from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import BatchDecision, DraftInputs, StepInputs
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_model

BLOCK_SIZE = 4


def load_recurrent(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The tiny model of `family` as the loader would give it; shared between tests."""
    return _loaded(family, dtype)


@cache
def _loaded(family: str, dtype: torch.dtype) -> LoadedModel:
    return as_loaded(tiny_model(family, dtype=dtype))


def make_recurrent_runner(
    family: str,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 64,
    num_slots: int = 4,
    max_drafts: int = 8,
    num_snapshots: int = 0,
    for_drafts: ForDrafts | None = None,
    host_room: tuple[int, int] = (0, 0),
) -> RecurrentRunner:
    """A runner over the shared tiny model, with room for blocks and states of `host_room` on the host."""
    loaded = load_recurrent(family, dtype)
    sampler = Sampler(loaded.vocab_size, loaded.device)
    sizes = MemorySizes(num_blocks, BLOCK_SIZE, num_slots, max_drafts, num_snapshots, *host_room)
    return RecurrentRunner(loaded, sizes, sampler, for_drafts or ForDrafts())


def pack_slots(parts: Mapping[int, Part], *, every_row: bool = False) -> StepInputs:
    """The step that computes `parts`, by seat, in this order."""
    inputs = pack_step(list(parts.values()), BLOCK_SIZE, every_row=every_row)
    return replace(inputs, state_slots=np.array(list(parts), dtype=np.int32))


def with_drafts(inputs: StepInputs, num_drafts: Sequence[int]) -> StepInputs:
    """The step with the last so many tokens of each sequence as drafts, all of whose rows give logits."""
    if not any(num_drafts):
        return inputs
    counts = np.array(num_drafts, np.int32)
    sequence = np.flatnonzero(counts).astype(np.int32)
    stops = np.cumsum(inputs.query_lens)
    wanted = [np.arange(stop - 1 - count, stop) for stop, count in zip(stops, counts, strict=True)]
    rows = np.concatenate(wanted).astype(np.int64)
    drafts = DraftInputs(
        sequence=sequence,
        first_row=(np.cumsum(counts + 1) - counts - 1)[sequence].astype(np.int64),
        num_drafts=counts[sequence],
        token_ids=np.concatenate([inputs.token_ids[each[1:]] for each in wanted]),
    )
    sampling = plain_sampling(inputs.positions[rows] + 1)
    return replace(inputs, logits_rows=rows, sampling=sampling, drafts=drafts)


@cache
def _reference(family: str) -> PreTrainedModel:
    """A model of its own for transformers' answers, which nothing of ours has touched."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.inference_mode()
def whole_logits(family: str, tokens: Sequence[int]) -> torch.Tensor:
    """Transformers' own forward pass over a whole sequence: [tokens, vocab]."""
    logits: torch.Tensor = _reference(family)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def generated(family: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' own greedy generation gives, with its own cache.

    Computed once a process: tests of many kinds hold ours to the same words.
    """
    return list(_generated(family, tuple(prompt), num_tokens))


@cache
@torch.inference_mode()
def _generated(family: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    output = _reference(family).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return tuple(output[0, len(prompt) :].tolist())


def serve(
    batcher: ContinuousBatcher,
    runner: RecurrentRunner,
    arrivals: Mapping[int, Sequence[Request]],
    on_decision: Callable[[BatchDecision], None] | None = None,
) -> None:
    """Run steps until all requests have ended; `arrivals` come before the step of that number."""
    number = 0
    while batcher.has_work or number <= max(arrivals, default=-1):
        for request in arrivals.get(number, ()):
            batcher.add(request)
        decision = batcher.step()
        if on_decision is not None:
            on_decision(decision)
        if decision.inputs is not None:
            batcher.commit(decision, runner.run(decision.inputs).rows)
        number += 1


@torch.inference_mode()
def run_pieces(
    forward: RecurrentForward,
    memory: StateMemory,
    sequences: Mapping[int, Sequence[int]],
    steps: Sequence[Sequence[tuple[int, int]]],
) -> dict[int, torch.Tensor]:
    """Logits of every token of `sequences`, which are by seat, computed in `steps` of (seat, tokens)."""
    width = -(-max(len(tokens) for tokens in sequences.values()) // BLOCK_SIZE)
    computed = dict.fromkeys(sequences, 0)
    pieces: dict[int, list[torch.Tensor]] = {seat: [] for seat in sequences}
    for step in steps:
        parts = {
            seat: Part(
                sequences[seat],
                computed[seat],
                computed[seat] + count,
                range(seat * width, (seat + 1) * width),
            )
            for seat, count in step
        }
        logits = forward(pack_slots(parts, every_row=True), memory)
        for (seat, count), piece in zip(step, torch.split(logits, [n for _, n in step]), strict=True):
            computed[seat] += count
            pieces[seat].append(piece)
    return {seat: torch.cat(logits) for seat, logits in pieces.items()}
