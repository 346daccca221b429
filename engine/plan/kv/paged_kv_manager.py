"""PagedKvManager: the block table of every sequence that holds KV. Accounting only; loop thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

import numpy as np

from engine.errors import RewindError, RewindFault
from engine.plan.kv.block_pool import BlockPool
from engine.plan.kv.prefix_cache import PrefixCache
from engine.plan.kv.state_snapshots import StateSnapshots
from engine.plan.kv.swap import SwapSpace
from engine.plan.step_records import BlockCopy, Int32


@dataclass(slots=True)
class _Sequence:
    """A row of the table matrix, blocks in token order, the tokens they hold, and how many are published.

    `state_at` is the tokens behind which its state can be had; None while nobody is to have it.
    """

    row: int
    num_tokens: int
    block_ids: list[int]
    num_published: int = 0
    is_suspect: bool = False
    state_at: int | None = None


class Rewindable(Enum):
    """Which tokens of a sequence a model can take back once they are computed."""

    ANYWHERE = "any"  # all it knows of them lies in blocks
    DRAFTS = "drafts"  # those that its last step verified
    NEVER = "none"


class PagedKvManager:
    """Maps each sequence's token positions onto fixed blocks of `block_size` tokens.

    A sequence has a *row* from its first blocks until `free`; `block_tables[row]` lists its blocks, with 0
    behind the last. Forks share blocks, and so do sequences that begin with the same published blocks; call
    `copy_on_write` before writing into such a block. "Does not fit" is False or None and changes nothing; an
    unknown request id is a KeyError.

    `pool` has the blocks, `prefixes` finds the published ones, which count as free once no sequence holds
    them, and `host` has the KV and the states of swapped-out sequences. Where a model `keeps_state` outside
    the blocks, sequences are forked only where `hold_state` says, cut only as far as it is `rewindable`, and
    begin on published blocks only where `snapshots` has the state behind them.

    KV is *suspect* from `mark_kv_suspect` until `mark_kv_good`: it may be non-finite. Blocks that a suspect
    sequence leaves are zeroed before the next pass, since a NaN spoils a weighted sum even at weight zero.
    Published blocks are not written again and never zeroed; those of a bad sequence are withdrawn first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        num_host_blocks: int = 0,
        *,
        rewindable: Rewindable = Rewindable.ANYWHERE,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rewindable = rewindable
        self.max_num_seqs = max_num_seqs
        self.max_blocks_per_seq = min(max_blocks_per_seq, num_blocks)
        self.max_tokens_per_seq = self.max_blocks_per_seq * block_size  # of one that is alone
        self.block_tables: Int32 = np.zeros((max_num_seqs, self.max_blocks_per_seq), np.int32)
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(self.pool)
        self.snapshots = StateSnapshots(0)
        self.host = SwapSpace(num_host_blocks, 0 if self.keeps_state else None)
        self._sequences: dict[str, _Sequence] = {}
        self._reserved: set[int] = set()
        self._scrub_blocks: list[int] = []
        self._scrubs_in_flight: deque[tuple[int, ...]] = deque()  # a step's each, oldest first
        self._copied_from: set[int] = set()  # by the next step or the one in flight
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))  # a stack: the lowest row is on top at first

    def keep_states(self, num_snapshots: int, num_host_states: int) -> None:
        """Before the first sequence of a model that `keeps_state`: room for states.

        So many at the ends of published blocks, and so many of swapped-out sequences on the host.
        """
        assert self.keeps_state and not self._sequences, "room is made before there are sequences"
        self.snapshots = StateSnapshots(num_snapshots)
        self.prefixes.on_gone = self.snapshots.forget
        self.host = SwapSpace(self.host.num_blocks, num_host_states)

    @property
    def keeps_state(self) -> bool:
        """True if the model carries something from token to token that lies in no block."""
        return self.rewindable is not Rewindable.ANYWHERE

    @property
    def num_used_blocks(self) -> int:
        """Blocks referenced by at least one sequence."""
        return self.num_blocks - self.pool.num_free

    @property
    def usage(self) -> float:
        """Used blocks over all blocks, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def row(self, request_id: str) -> int:
        """The sequence's row of `block_tables`; constant while it holds one."""
        return self._sequences[request_id].row

    def row_for(self, request_id: str, num_tokens: int) -> int:
        """The same, for a pass that reaches `num_tokens` tokens. AssertionError if it holds fewer blocks.

        Behind its last block a row says 0: such a pass would write into another sequence's block.
        """
        sequence = self._sequences[request_id]
        assert num_tokens <= sequence.num_tokens, (
            f"{request_id} is scheduled up to token {num_tokens} and holds blocks for {sequence.num_tokens}"
        )
        return sequence.row

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The sequence's blocks in token order."""
        return tuple(self._sequences[request_id].block_ids)

    def num_blocks_held(self, request_id: str) -> int:
        """How many blocks the sequence holds."""
        return len(self._sequences[request_id].block_ids)

    def num_published(self, request_id: str) -> int:
        """How many of its leading blocks were published, they or others with the same contents."""
        return self._sequences[request_id].num_published

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def blocks_to_start(self, num_tokens: int, found: Sequence[int]) -> int:
        """Free blocks that `start` would take: those beside the `found`, and the found ones that are free."""
        return self.blocks_for(num_tokens) - sum(self.pool.ref_count(block_id) > 0 for block_id in found)

    def start(self, request_id: str, num_tokens: int, found: Sequence[int] = ()) -> bool:
        """Give a new sequence a row and blocks for `num_tokens`, the first being those `found` published.

        If its KV is on the host, the blocks behind those found are copied back from there.
        """
        assert request_id not in self._sequences, f"{request_id} already holds KV"
        if not self._free_rows or self.blocks_to_start(num_tokens, found) > self.pool.num_free:
            return False
        if self.blocks_for(num_tokens) > self.max_blocks_per_seq:
            return False
        sequence = _Sequence(self._free_rows.pop(), len(found) * self.block_size, list(found), len(found))
        self.pool.share(found)
        self.block_tables[sequence.row, : len(found)] = found
        self._grow(sequence, num_tokens)
        self._sequences[request_id] = sequence
        if request_id in self.host:
            self.host.restore(request_id, sequence.block_ids, len(found), sequence.row)
        return True

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Grow the sequence to hold `num_tokens` in total, taking a row if it has none. Never shrinks."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return self.start(request_id, num_tokens)
        return num_tokens <= sequence.num_tokens or self._grow(sequence, num_tokens)

    def _grow(self, sequence: _Sequence, num_tokens: int) -> bool:
        held = len(sequence.block_ids)
        if num_tokens > held * self.block_size:
            needed = self.blocks_for(num_tokens)
            new = self.pool.take(needed - held) if needed <= self.max_blocks_per_seq else None
            if new is None:
                return False
            sequence.block_ids += new
            self.block_tables[sequence.row, held:needed] = new
        sequence.num_tokens = num_tokens
        return True

    def fork(self, parent_id: str, child_id: str) -> bool:
        """Give `child_id` a row of its own over the parent's blocks; False if no row is free."""
        parent = self._sequences[parent_id]
        assert child_id not in self._sequences, f"{child_id} already holds KV"
        if not self._free_rows:
            return False
        child = replace(parent, row=self._free_rows.pop(), block_ids=parent.block_ids.copy(), state_at=None)
        self.pool.share(child.block_ids)
        self.block_tables[child.row] = self.block_tables[parent.row]
        self._sequences[child_id] = child
        return True

    def hold_state(self, request_id: str, num_tokens: int | None) -> None:
        """Until its next pass its state behind so many of its tokens can be had, too; None: it cannot."""
        self._sequences[request_id].state_at = num_tokens

    def state_at(self, request_id: str) -> int | None:
        """What `hold_state` said last of this sequence."""
        return self._sequences[request_id].state_at

    def copy_on_write(self, request_id: str, first_position: int) -> tuple[BlockCopy, ...] | None:
        """Make the blocks from `first_position` on the sequence's own; the copies to do before writing there.

        Empty when none of them is shared. None when too few blocks are free; nothing has changed then. Those
        of them that were published are withdrawn.
        """
        sequence = self._sequences[request_id]
        first = first_position // self.block_size
        ref_count = self.pool.ref_count
        shared = [i for i in range(first, len(sequence.block_ids)) if ref_count(sequence.block_ids[i]) > 1]
        own = self.pool.take(len(shared))
        if own is None:
            return None
        copies = []
        for index, target in zip(shared, own, strict=True):
            copies.append(BlockCopy(sequence.block_ids[index], target))
            sequence.block_ids[index] = target
            self.block_tables[sequence.row, index] = target
        self.pool.release(copy.source for copy in copies)
        for block_id in sequence.block_ids[first:]:  # about to be written over; a fork may have published it
            self.prefixes.withdraw(block_id)
        sequence.num_published = min(sequence.num_published, first)
        return tuple(copies)

    def begin_copies(self, copies: Iterable[BlockCopy]) -> None:
        """The next step does these: whatever becomes of their sources' owners, nothing is read into them."""
        self._copied_from.update(copy.source for copy in copies)

    def end_copies(self) -> None:
        """The step with these copies is over; those of one that failed are not asked for again."""
        self._copied_from.clear()

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Cut the sequence to its first `num_tokens`; blocks past the new end are released, last one first.

        Stale slots are overwritten before they are read again. A published block that is cut in its middle
        needs `copy_on_write` before it is written. Raises RewindError: NOT_SUPPORTED if the model is NEVER
        rewindable, POSITION_BEYOND_END if the sequence holds fewer tokens. That DRAFTS lets no other token be
        cut off is the caller's to keep.
        """
        sequence = self._sequences[request_id]
        if self.rewindable is Rewindable.NEVER:
            raise RewindError(
                RewindFault.NOT_SUPPORTED,
                "this model keeps state that cannot be cut back to an earlier token",
            )
        if num_tokens > sequence.num_tokens:
            raise RewindError(
                RewindFault.POSITION_BEYOND_END,
                f"cannot rewind to {num_tokens} tokens: the sequence holds {sequence.num_tokens}",
            )
        kept = self.blocks_for(num_tokens)
        sequence.num_published = min(sequence.num_published, kept)
        self.pool.release(reversed(sequence.block_ids[kept:]))
        del sequence.block_ids[kept:]
        self.block_tables[sequence.row, kept:] = 0
        sequence.num_tokens = num_tokens

    def free(self, request_id: str) -> None:
        """Release all the sequence holds, its row and its claims.

        The last block is released first, so that a prefix, which other requests may want again, is reused
        last.
        """
        sequence = self._sequences.pop(request_id)
        self.prefixes.unclaim(request_id)
        self.snapshots.close(request_id)
        self.pool.release(reversed(sequence.block_ids))
        self.block_tables[sequence.row, : len(sequence.block_ids)] = 0
        self._free_rows.append(sequence.row)
        if sequence.is_suspect:
            left_over = (b for b in sequence.block_ids if self.pool.ref_count(b) == 0)
            self.scrub(b for b in left_over if b not in self.prefixes)

    def publish(self, request_id: str, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Let its first `num_blocks` blocks, full, computed and good, be found; its claims end."""
        sequence = self._sequences[request_id]
        self.prefixes.unclaim(request_id)
        publish = self.prefixes.publish
        for index in range(sequence.num_published, num_blocks):
            publish(sequence.block_ids[index], hashes[index])
        sequence.num_published = max(sequence.num_published, num_blocks)

    @property
    def num_reserved(self) -> int:
        """Blocks that no sequence holds and that are not free all the same."""
        return len(self._reserved)

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Take free blocks to have them filled from elsewhere; None unless one is left for each sequence.

        None, too, if a step is yet to zero any of them, which could come when it is filled, or to copy it to
        the host or for a fork. Those that no step was told to zero are filled instead: else they would stay
        in the way for as long as nothing else is computed.
        """
        if num_blocks + len(self._sequences) > self.pool.num_free:
            return None
        block_ids = self.pool.take(num_blocks) or []
        taken = set(block_ids)
        if not taken.isdisjoint(chain(self.host.sources(), self._copied_from, *self._scrubs_in_flight)):
            self.pool.release(block_ids)
            return None
        self._scrub_blocks = [block_id for block_id in self._scrub_blocks if block_id not in taken]
        self._reserved |= taken
        return block_ids

    def unreserve(self, block_ids: Sequence[int]) -> None:
        """Release reserved blocks; what they hold may be non-finite where it was not published."""
        self._reserved.difference_update(block_ids)
        self.scrub(block_id for block_id in block_ids if block_id not in self.prefixes)
        self.pool.release(reversed(block_ids))

    def is_suspect(self, request_id: str) -> bool:
        """True while no finite row of logits was drawn from all the KV of this sequence."""
        return self._sequences[request_id].is_suspect

    def mark_kv_good(self, request_id: str) -> bool:
        """A finite row was drawn from all the KV of this sequence; True if it was suspect until now."""
        sequence = self._sequences[request_id]
        was_suspect, sequence.is_suspect = sequence.is_suspect, False
        return was_suspect

    def mark_kv_suspect(self, request_id: str) -> None:
        """The KV that is being computed for this sequence may be non-finite."""
        self._sequences[request_id].is_suspect = True

    def mark_kv_bad(self, request_id: str) -> None:
        """All that this sequence holds may be non-finite, even what was found: none of it is found again."""
        sequence = self._sequences[request_id]
        for block_id in sequence.block_ids:
            self.prefixes.withdraw(block_id)
        self.snapshots.withdraw(request_id)
        sequence.num_published, sequence.is_suspect = 0, True

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Have these blocks zeroed before the next pass."""
        self._scrub_blocks += block_ids

    def take_scrub_blocks(self) -> tuple[int, ...]:
        """The blocks to zero before the next pass; each is handed out once. `end_scrub` must follow."""
        block_ids, self._scrub_blocks = tuple(self._scrub_blocks), []
        self._scrubs_in_flight.append(block_ids)
        return block_ids

    def end_scrub(self) -> None:
        """The oldest pass that blocks were handed out for is over; those of one that failed come again."""
        self._scrubs_in_flight.popleft()

    def swap_out(self, request_id: str, num_tokens: int) -> None:
        """Keep the KV of its first `num_tokens`, and its state, on the host, before its blocks are freed.

        They must fit.
        """
        if request_id in self.host:
            self.host.stay(request_id)  # the step that should have restored it failed
        else:
            sequence = self._sequences[request_id]
            self.host.save(request_id, sequence.block_ids[: self.blocks_for(num_tokens)], sequence.row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, tables and rows agree. O(blocks): for tests and idle time."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        self.snapshots.check_integrity(self.prefixes.has)
        self.host.check_integrity()
        tables = [sequence.block_ids for sequence in self._sequences.values()]
        held = np.bincount(np.fromiter(chain(self._reserved, *tables), np.int64), minlength=self.num_blocks)
        counts = self.pool.ref_counts()
        for block_id in np.flatnonzero(counts != held)[:1].tolist():
            message = f"{counts[block_id]} references, {held[block_id]} tables"
            raise AssertionError(f"block {block_id}: {message}")
        rows = [sequence.row for sequence in self._sequences.values()] + self._free_rows
        assert sorted(rows) == list(range(self.max_num_seqs)), f"rows are lost or doubled: {sorted(rows)}"
        num_filled = 0
        for sequence in self._sequences.values():
            num_blocks = self.blocks_for(sequence.num_tokens)
            assert len(sequence.block_ids) == num_blocks, f"row {sequence.row}: length"
            if sequence.state_at is not None:
                is_held = self.rewindable is Rewindable.DRAFTS and 0 < sequence.state_at < sequence.num_tokens
                assert is_held, f"row {sequence.row}: no state behind {sequence.state_at} tokens"
            table = self.block_tables[sequence.row, : len(sequence.block_ids)]
            assert (table == sequence.block_ids).all(), f"the table matrix differs in row {sequence.row}"
            num_filled += int(np.count_nonzero(table))
        assert np.count_nonzero(self.block_tables) == num_filled, (
            "the table matrix differs from the block lists"
        )
