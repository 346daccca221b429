"""Dummy steps: inputs made without a scheduler or a request, for the self-check, warm-up and profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from engine.plan.step_records import DraftInputs, Int64, SamplingInputs, StepInputs


class Part(NamedTuple):
    """Tokens [first, stop) of one sequence, which owns `blocks`.

    The last of them are drafts, one for each of `parents`, which are as in DraftInputs.
    """

    token_ids: Sequence[int]
    first: int
    stop: int
    blocks: Sequence[int]
    parents: Sequence[int] = ()


def pack_step(
    parts: Sequence[Part], block_size: int, *, every_row: bool = False, temperature: float = 0.0
) -> StepInputs:
    """The inputs of a step that computes `parts` in this order.

    The step gives logits for each part's last token, for a part with drafts its newest token and each draft,
    or for all tokens with `every_row`.
    """
    lengths = np.array([part.stop - part.first for part in parts], dtype=np.int32)
    num_drafts = np.array([len(part.parents) for part in parts], dtype=np.int32)
    has_drafts = bool(num_drafts.any())
    places = _numbers(range(part.first, part.stop) for part in parts)
    positions = _numbers(map(_positions, parts)) if has_drafts else places
    owners = np.repeat(np.arange(len(parts)), lengths)
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), dtype=np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.blocks)] = part.blocks
    stops = np.cumsum(lengths, dtype=np.int64)
    is_wanted = places >= np.repeat(places[stops - 1] - num_drafts, lengths)
    logits_rows = (is_wanted | every_row).nonzero()[0]
    token_ids = _numbers(part.token_ids[part.first : part.stop] for part in parts)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=tables[owners, places // block_size].astype(np.int64) * block_size + places % block_size,
        query_lens=lengths,
        kv_lens=np.array([part.stop for part in parts], dtype=np.int32),
        block_tables=tables,
        logits_rows=logits_rows,
        sampling=plain_sampling(positions[logits_rows] + 1, temperature),
        drafts=_drafts(parts, token_ids, logits_rows) if has_drafts else None,
    )


def _numbers(runs: Iterable[Iterable[int]]) -> Int64:
    """All of these, one behind the other: most runs are too short to be arrays of their own."""
    return np.array(list(chain.from_iterable(runs)), np.int64)


def _positions(part: Part) -> list[int]:
    """Positions, each one more than that of the token it follows: [num_tokens]."""
    newest = part.stop - len(part.parents) - 1
    positions = list(range(part.first, newest + 1))
    for parent in part.parents:
        positions.append(positions[newest - part.first + 1 + parent] + 1)
    return positions


def _drafts(parts: Sequence[Part], token_ids: np.ndarray, logits_rows: np.ndarray) -> DraftInputs:
    """The drafts of `parts` that have any."""
    stops = np.cumsum([part.stop - part.first for part in parts])
    sequence = np.array([row for row, part in enumerate(parts) if part.parents], dtype=np.int32)
    num_drafts = np.array([len(parts[row].parents) for row in sequence], dtype=np.int32)
    newest = stops[sequence] - num_drafts - 1  # [V] indices into the packed tokens
    return DraftInputs(
        sequence=sequence,
        first_row=np.searchsorted(logits_rows, newest),
        num_drafts=num_drafts,
        token_ids=np.concatenate(
            [
                token_ids[first + 1 : first + 1 + count]
                for first, count in zip(newest, num_drafts, strict=True)
            ]
        ),
        parents=np.array([parent for part in parts for parent in part.parents], dtype=np.int32),
    )


def plain_sampling(positions: np.ndarray, temperature: float = 0.0) -> SamplingInputs:
    """Rows that draw at `positions` with a temperature and no other option; 0 is greedy."""
    num_rows = len(positions)
    return SamplingInputs(
        temperature=np.full(num_rows, temperature, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int32),
        top_p=np.ones(num_rows, dtype=np.float32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        seed=np.zeros(num_rows, dtype=np.int64),
        position=positions.astype(np.int64),
        num_logprobs=np.full(num_rows, -1, dtype=np.int32),
    )
