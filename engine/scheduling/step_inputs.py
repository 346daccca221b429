"""build_step_inputs: from what the scheduler chose to the arrays of one packed forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from engine.kv.paged_kv_manager import PagedKvManager
from engine.outputs import BlockCopy, Int32, Int64, ScheduledRequest, StepInputs
from engine.request import Request
from engine.scheduling.sampling_table import SamplingTable


class BlockMoves(NamedTuple):
    """What happens to whole blocks before a pass, in this order; see StepInputs."""

    swap_out: tuple[BlockCopy, ...] = ()
    scrub: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()


NO_MOVES = BlockMoves()


def build_step_inputs(
    scheduled: Sequence[ScheduledRequest],
    requests: Sequence[Request],
    kv: PagedKvManager,
    sampling: SamplingTable,
    moves: BlockMoves = NO_MOVES,
) -> StepInputs:
    """The packed pass over `scheduled`, whose requests are `requests`, one by one; at least one.

    Blocks for every scheduled token must be allocated. The arrays are new: nothing of `kv` is aliased.
    """
    _, first_positions, num_tokens, samples, _ = zip(*scheduled, strict=True)
    rows = np.array([kv.row(request.request_id) for request in requests], np.int64)  # [S]
    first = np.array(first_positions, np.int64)  # [S]
    query_lens = np.array(num_tokens, np.int32)  # [S]
    kv_lens = first + query_lens  # [S]
    ends = np.cumsum(query_lens, dtype=np.int64)  # [S]
    sequence = np.repeat(np.arange(len(rows)), query_lens)  # [N]
    positions = np.arange(ends[-1]) + (kv_lens - ends)[sequence]  # [N]
    block_tables = _block_tables(kv, rows, kv_lens)  # [S, max blocks]
    block, offset = np.divmod(positions, kv.block_size)
    is_sampled = np.array(samples, np.bool_)  # [S]
    return StepInputs(
        token_ids=_token_ids(scheduled, requests),
        positions=positions,
        slot_mapping=block_tables[sequence, block].astype(np.int64) * kv.block_size + offset,
        query_lens=query_lens,
        kv_lens=kv_lens.astype(np.int32),
        block_tables=block_tables,
        logits_rows=ends[is_sampled] - 1,
        sampling=sampling.gather(rows[is_sampled], list(compress(requests, samples)), kv_lens[is_sampled]),
        block_copies=moves.copies,
        scrub_blocks=moves.scrub,
        swap_out=moves.swap_out,
        swap_in=moves.swap_in,
    )


def _token_ids(scheduled: Sequence[ScheduledRequest], requests: Sequence[Request]) -> Int64:
    """The tokens to compute, sequence by sequence. [N]"""
    token_ids: list[int] = []
    for (_, first, count, *_), request in zip(scheduled, requests, strict=True):
        if count == 1:
            token_ids.append(request.token_ids[first])
        else:
            token_ids += request.token_ids[first : first + count]
    return np.array(token_ids, np.int64)


def _block_tables(kv: PagedKvManager, rows: Int64, kv_lens: Int64) -> Int32:
    """The tables of these rows, with 0 for blocks that this step does not reach yet. [S, max blocks]"""
    num_blocks = -(-kv_lens // kv.block_size)  # [S]
    width = int(num_blocks.max())
    tables: Int32 = kv.block_tables[rows, :width]  # fancy indexing: a copy
    tables[np.arange(width) >= num_blocks[:, None]] = 0
    return tables
