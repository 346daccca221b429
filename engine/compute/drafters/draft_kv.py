"""DraftKv: the blocks and tensors of the sequences that a draft model follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.compute.attention.kv_tensors import KvTensors
from engine.plan.kv.paged_kv_manager import PagedKvManager


@dataclass(slots=True)
class _Held:
    """How much of a sequence's KV is valid, and whether a good row was drawn from all of it."""

    num_computed: int = 0
    is_kv_good: bool = True


class DraftKv:
    """Room for as many sequences as fit; the least recently used ones give way to those drafted for now.

    A sequence whose KV was dropped is read again, which costs time only. Blocks that may hold non-finite
    values are scrubbed before another sequence gets them. A fork shares the blocks of what was computed
    before it. Used by one thread at a time.
    """

    def __init__(self, tensors: KvTensors, max_num_seqs: int, max_model_len: int) -> None:
        max_blocks = -(-max_model_len // tensors.block_size)
        self.manager = PagedKvManager(tensors.num_blocks, tensors.block_size, max_num_seqs, max_blocks)
        self.tensors = tensors
        self._held: dict[str, _Held] = {}  # least recently used first

    def num_computed(self, request_id: str) -> int:
        """Leading tokens whose KV is valid; 0 for a sequence that holds none."""
        held = self._held.get(request_id)
        return 0 if held is None else held.num_computed

    def blocks(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """The blocks of the first `num_tokens` tokens, for which there is room."""
        return self.manager.block_ids(request_id)[: self.manager.blocks_for(num_tokens)]

    def make_room(self, request_id: str, num_tokens: int, current: Collection[str]) -> bool:
        """Get room for `num_tokens` in total, from sequences that are not `current` if need be.

        False if that is not enough. The sequence then loses its blocks to those that can go on.
        """
        held = self._held.pop(request_id, None)
        self._held[request_id] = held or _Held()  # now the most recently used
        if self.extend(request_id, num_tokens, current):
            return True
        self.drop(request_id)
        return False

    def extend(self, request_id: str, num_tokens: int, current: Collection[str]) -> bool:
        """As `make_room`, but without enough room the sequence keeps what it has."""
        while not self.manager.allocate(request_id, num_tokens):
            others = (other for other in self._held if other not in current and other in self.manager)
            victim = next(others, None)
            if victim is None or num_tokens > self.manager.max_tokens_per_seq:
                return False
            self.drop(victim)
        return True

    def fork(self, request_id: str, lane_id: str, num_tokens: int) -> bool:
        """Have `lane_id` begin with the first `num_tokens` tokens of another, as far as these are computed.

        False where they are not, or no row is free.
        """
        if num_tokens > self.num_computed(request_id) or not self.manager.fork(request_id, lane_id):
            return False
        self.manager.rewind(lane_id, num_tokens)
        self._held[lane_id] = _Held(num_tokens)
        return True

    def make_own(self, lane_id: str, num_tokens: int) -> bool:
        """Get room for `num_tokens` of a fork in blocks of its own from what it has computed on.

        From free blocks only: False where there are too few, or where it was dropped for others.
        """
        if lane_id not in self.manager or not self.manager.allocate(lane_id, num_tokens):
            return False
        copies = self.manager.copy_on_write(lane_id, self.num_computed(lane_id))
        if copies is None:
            return False
        self.tensors.copy_blocks(copies)
        return True

    def advance(self, request_id: str, num_tokens: int, *, is_kv_good: bool) -> None:
        """The first `num_tokens` tokens are computed; their KV is good if a finite row was drawn from it."""
        held = self._held[request_id]
        held.num_computed, held.is_kv_good = num_tokens, is_kv_good

    def cut(self, request_id: str, num_tokens: int) -> None:
        """Drop the KV after the first `num_tokens` tokens."""
        held = self._held.get(request_id)
        if held is None:
            return
        held.num_computed = min(held.num_computed, num_tokens)
        kept = self.manager.blocks_for(held.num_computed)
        released = self.manager.block_ids(request_id)[kept:]
        self.manager.rewind(request_id, held.num_computed)
        if not held.is_kv_good:
            self.tensors.scrub_blocks(released)

    def drop(self, request_id: str) -> None:
        """Free all that the sequence holds, if it holds anything."""
        held = self._held.pop(request_id, None)
        if held is None or request_id not in self.manager:
            return
        if not held.is_kv_good:
            blocks, ref_count = self.manager.block_ids(request_id), self.manager.pool.ref_count
            self.tensors.scrub_blocks([block for block in blocks if ref_count(block) == 1])
        self.manager.free(request_id)

    def drop_suspect(self, request_id: str) -> None:
        """Free and scrub all that the sequence holds, because it may be non-finite."""
        if request_id in self._held:
            self._held[request_id].is_kv_good = False
            self.drop(request_id)
