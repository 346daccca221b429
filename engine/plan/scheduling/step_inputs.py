"""build_step_inputs: the arrays of one packed forward pass, from the items that the scheduler chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.speculation.draft_tape import DraftedToken
from engine.plan.step_records import (
    NO_TOKEN,
    BlockMoves,
    DraftInputs,
    Int32,
    Int64,
    PromptRows,
    SamplingInputs,
    ScheduledRequest,
    StepInputs,
    UnreadDrafts,
)


class ScheduledItem(NamedTuple):
    """What one request computes in a step, and the drafts after its newest token."""

    scheduled: ScheduledRequest
    request: Request
    drafted: Sequence[DraftedToken] = ()
    previous_row: int = -1  # of the step before, which draws its last token; -1 if that is known
    is_held_back: bool = False  # its state stays before its last token, so that others can begin there


def next_tokens(request: Request, count: int = 1) -> ScheduledItem:
    """The next `count` known tokens of a request."""
    first = request.num_computed_tokens
    samples = first + count == len(request.token_ids)
    return ScheduledItem(ScheduledRequest(request.request_id, first, count, samples), request)


def token_drawn_by(request: Request, row: int) -> ScheduledItem:
    """The token after the known ones of a request, which this row of the step before draws."""
    first = len(request.token_ids)
    return ScheduledItem(
        ScheduledRequest(request.request_id, first, 1, samples=True), request, previous_row=row
    )


class _Places(NamedTuple):
    """Where a step's sequences end, whose its tokens are, and the tokens whose logits are wanted."""

    ends: Int64  # [S]
    sequence: Int64  # [N]
    sampled: Int64  # [R] sequences
    tokens: Int64  # [R]

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> _Places:
        """Those of these sequences in turn."""
        _, _, num_tokens, samples, num_drafts = zip(*scheduled, strict=True)
        numbers = np.arange(len(scheduled))
        if all(samples) and max(num_tokens) == 1:  # most steps: a token and a row each
            return cls(numbers + 1, numbers, numbers, numbers)
        query_lens = np.array(num_tokens, np.int64)
        num_rows = (np.array(num_drafts, np.int64) + 1) * np.array(samples, np.bool_)
        ends = query_lens.cumsum()
        sampled = numbers.repeat(num_rows)
        behind = num_rows.cumsum()[sampled] - np.arange(len(sampled))  # rows to its sequence's last, +1
        return cls(ends, numbers.repeat(query_lens), sampled, ends[sampled] - behind)


def build_step_inputs(
    items: Sequence[ScheduledItem], kv: PagedKvManager, sampling: SamplingTable, moves: BlockMoves
) -> StepInputs:
    """The packed pass over `items`, at least one.

    Blocks for every scheduled token must be allocated: AssertionError if they are not. The arrays are new:
    nothing of `kv` is aliased.
    """
    scheduled, requests, drafted, previous, _ = zip(*items, strict=True)
    names, first_positions, num_tokens, _, num_drafts = zip(*scheduled, strict=True)
    query_lens = np.array(num_tokens, np.int32)  # [S]
    kv_lens = np.array(first_positions, np.int64) + query_lens  # [S]
    rows = np.array(list(map(kv.row_for, names, kv_lens.tolist())), np.int64)  # [S]
    ends, sequence, sampled, tokens = _Places.of(scheduled)
    indices = np.arange(len(sequence)) + (kv_lens - ends)[sequence]  # [N] each token's place in its sequence
    block_tables = _block_tables(kv, rows, kv_lens)  # [S, max blocks]
    block, offset = np.divmod(indices, kv.block_size)
    has_drafts = any(num_drafts)
    positions = _positions(indices, ends, drafted) if has_drafts else indices  # [N]
    is_ahead = max(previous) >= 0
    is_drawn_later = is_ahead and any(request.draws_by_history for request in requests)
    drawn_by = sampling.columns(rows[sampled], positions[tokens] + 1)
    if not is_drawn_later and sampling.may_adjust(rows):
        paths = _paths(items) if has_drafts or is_ahead else None
        drawn_by = sampling.adjusted(drawn_by, rows[sampled], [requests[s] for s in sampled.tolist()], paths)
    return StepInputs(
        token_ids=_token_ids(items),
        positions=positions,
        slot_mapping=block_tables[sequence, block] * np.int64(kv.block_size) + offset,
        query_lens=query_lens,
        kv_lens=kv_lens.astype(np.int32),
        block_tables=block_tables,
        logits_rows=tokens,
        sampling=drawn_by,
        drafts=_draft_inputs(drafted, sampled) if has_drafts else None,
        prompt_rows=_prompt_rows(items, sampling.scoring(rows), ends),
        state_slots=rows.astype(np.int32),
        held_back=tuple(s for s, item in enumerate(items) if item.is_held_back),
        moves=moves,
        previous_rows=_previous_rows(previous, ends) if is_ahead else None,
        is_drawn_later=is_drawn_later,
    )


def sampling_now(
    inputs: StepInputs, items: Sequence[ScheduledItem], sampling: SamplingTable
) -> SamplingInputs:
    """What a step that is drawn later draws by, its tokens being known now; each item has one row.

    Of a request that has ended since, the row is drawn all the same, by its columns alone.
    """
    assert inputs.is_drawn_later and inputs.state_slots is not None, "it was launched with its draw"
    rows = inputs.state_slots.astype(np.int64)
    return sampling.adjusted(inputs.sampling, rows, [item.request for item in items])


def _prompt_rows(items: Sequence[ScheduledItem], asking: Sequence[int], ends: Int64) -> PromptRows | None:
    """The prompt tokens that follow those computed for the sequences that ask; None if there are none."""
    found: list[tuple[int, int, int, int]] = []
    for s in asking:
        (_, first, count, _, _), request, *_ = items[s]
        if not request.scores_prompt:
            continue  # its first token is drawn: what a pass that failed may have spoiled is computed again
        known = request.token_ids[first + 1 : min(first + count + 1, request.num_prompt_tokens)]
        start, num_top = int(ends[s]) - count, request.sampling.prompt_logprobs or 0
        found += [(s, start + i, token_id, num_top) for i, token_id in enumerate(known)]
    if not found:
        return None
    sequence, rows, token_ids, tops = zip(*found, strict=True)
    return PromptRows(
        np.array(sequence, np.int32),
        np.array(rows, np.int64),
        np.array(token_ids, np.int64),
        np.array(tops, np.int32),
    )


def _token_ids(items: Sequence[ScheduledItem]) -> Int64:
    """The tokens to compute, sequence by sequence. [N]"""
    token_ids: list[int] = []
    for (_, first, count, _, num_drafts), request, drafted, previous_row, _ in items:
        num_known = count - num_drafts
        if previous_row >= 0:
            token_ids.append(0)
        elif num_known == 1:
            token_ids.append(request.token_ids[first])
        else:
            token_ids += request.token_ids[first : first + num_known]
        if num_drafts:
            token_ids += [draft.token_id for draft in drafted]
    return np.array(token_ids, np.int64)


def _positions(indices: Int64, ends: Int64, drafted: Sequence[Sequence[DraftedToken]]) -> Int64:
    """Each token's absolute position: its index, but a draft of a tree stands one behind its parent. [N]"""
    positions = indices.copy()
    for s, drafts in enumerate(drafted):
        if _branches(drafts):
            first = int(ends[s]) - len(drafts)
            for i, parent in enumerate(_parents(drafts)):
                positions[first + i] = positions[first + parent] + 1
    return positions


def _previous_rows(previous: Sequence[int], ends: Int64) -> Int64:
    """The row of the step before that draws each token, the last of its sequence; -1 for known ones. [N]"""
    rows = np.full(ends[-1], -1, np.int64)
    rows[ends - 1] = previous
    return rows


def _paths(items: Sequence[ScheduledItem]) -> list[tuple[int, ...]]:
    """The drafts between the known tokens and each sampled row, its own included; NO_TOKEN if unknown. [R]"""
    paths: list[tuple[int, ...]] = []
    for scheduled, _, drafts, previous_row, _ in items:
        if not scheduled.samples:
            continue
        base = len(paths)
        paths.append((NO_TOKEN,) if previous_row >= 0 else ())
        for draft, parent in zip(drafts, _parents(drafts), strict=True):
            paths.append((*paths[base + 1 + parent], draft.token_id))
    return paths


def _draft_inputs(drafted: Sequence[Sequence[DraftedToken]], sequences: Int64) -> DraftInputs:
    """What verification needs to know, where at least one sequence has drafts."""
    verified = [s for s, drafts in enumerate(drafted) if drafts]
    drafts = [draft for s in verified for draft in drafted[s]]
    parents = None
    if any(_branches(drafted[s]) for s in verified):
        parents = np.array([p for s in verified for p in _parents(drafted[s])], np.int32)
    needs_probs = any(draft.probs is not None for draft in drafts)
    return DraftInputs(
        sequence=np.array(verified, np.int32),
        first_row=np.searchsorted(sequences, verified).astype(np.int64),
        num_drafts=np.array([len(drafted[s]) for s in verified], np.int32),
        token_ids=np.array([draft.token_id for draft in drafts], np.int64),
        parents=parents,
        probs=tuple(draft.probs for draft in drafts) if needs_probs else (),
        unread=_unread_drafts(drafts),
    )


def _unread_drafts(drafts: Sequence[DraftedToken]) -> UnreadDrafts | None:
    """Where those of a step lie that are still to be read; None if none is."""
    tokens = next((draft.unread.tokens for draft in drafts if draft.unread is not None), None)
    if tokens is None:
        return None
    places = [-1 if draft.unread is None else draft.unread.place for draft in drafts]
    return UnreadDrafts(tokens, np.array(places, np.int64))


def _branches(drafts: Sequence[DraftedToken]) -> bool:
    """True if any draft does not follow the one before it."""
    return any(draft.parent not in (None, i - 1) for i, draft in enumerate(drafts))


def _parents(drafts: Sequence[DraftedToken]) -> list[int]:
    """The parents, a chain's spelled out."""
    return [i - 1 if draft.parent is None else draft.parent for i, draft in enumerate(drafts)]


def _block_tables(kv: PagedKvManager, rows: Int64, kv_lens: Int64) -> Int32:
    """The tables of these rows, with 0 for blocks that this step does not reach yet. [S, max blocks]"""
    num_blocks = -(-kv_lens // kv.block_size)  # [S]
    width = int(num_blocks.max())
    tables: Int32 = kv.block_tables[rows, :width]  # fancy indexing: a copy
    if int(num_blocks.min()) < width:
        tables[np.arange(width) >= num_blocks[:, None]] = 0
    return tables
