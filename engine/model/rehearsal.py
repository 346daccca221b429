"""Steps made up without a scheduler or a request: what the self-check and the warm-up run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.outputs import SamplingInputs, StepInputs


class Part(NamedTuple):
    """Tokens [first, stop) of one sequence, which owns `blocks`."""

    token_ids: Sequence[int]
    first: int
    stop: int
    blocks: Sequence[int]


def pack_step(
    parts: Sequence[Part], block_size: int, *, every_row: bool = False, temperature: float = 0.0
) -> StepInputs:
    """The inputs that compute `parts` in this order and want the logits of each last token, or of all."""
    lengths = np.array([part.stop - part.first for part in parts], dtype=np.int32)
    positions = np.concatenate([np.arange(part.first, part.stop) for part in parts])
    owners = np.repeat(np.arange(len(parts)), lengths)
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), dtype=np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part.blocks)] = part.blocks
    num_tokens = len(positions)
    logits_rows = np.arange(num_tokens) if every_row else np.cumsum(lengths, dtype=np.int64) - 1
    return StepInputs(
        token_ids=np.concatenate([np.asarray(part.token_ids[part.first : part.stop]) for part in parts]),
        positions=positions,
        slot_mapping=tables[owners, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        query_lens=lengths,
        kv_lens=np.array([part.stop for part in parts], dtype=np.int32),
        block_tables=tables,
        logits_rows=logits_rows,
        sampling=plain_sampling(positions[logits_rows] + 1, temperature),
    )


def plain_sampling(positions: np.ndarray, temperature: float = 0.0) -> SamplingInputs:
    """Rows that draw at `positions` with nothing but a temperature, 0 being greedy."""
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
