"""PagedKvManager against a model made of plain lists: exact ids, exact order, and the right contents."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from engine.errors import RewindError, RewindFault
from engine.plan.kv.paged_kv_manager import PagedKvManager
from tests.support.examples import share_of
from tests.support.factories import free_block_ids

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS = 12, 3, 5, 6


class KvMachine(RuleBasedStateMachine):
    """The model: free lists, a list of blocks for each sequence, and a memory of what was written.

    A block's name is the pair of its parent's name and its tokens; the model publishes blocks by such names.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.kv = PagedKvManager(NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS)
        self.free = list(range(NUM_BLOCKS))
        self.kept: list[int] = []  # free, and published
        self.names: dict[int, bytes] = {}  # of published blocks
        self.num_published: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.contents: dict[str, list[int]] = {}  # what each sequence must read back
        self.memory = [[-1] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.num_names = 0
        self.num_writes = 0

    def ref_counts(self) -> Counter[int]:
        return Counter(block_id for table in self.tables.values() for block_id in table)

    def release(self, block_ids: list[int]) -> None:
        """Blocks that no table holds any more go to the tail of the free list."""
        held = self.ref_counts()
        for block_id in block_ids:
            if not held[block_id]:
                (self.kept if block_id in self.names else self.free).append(block_id)

    def take(self, count: int) -> list[int]:
        """The blocks that are to be handed out next; what they hold is not found any more."""
        taken = (self.free + self.kept)[:count]
        for block_id in taken:
            (self.kept if block_id in self.names else self.free).remove(block_id)
            self.names.pop(block_id, None)
        return taken

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.kept)

    def hashes(self, content: list[int]) -> list[bytes]:
        """The names of the full blocks of these tokens."""
        names: list[bytes] = []
        for start in range(0, len(content) - BLOCK_SIZE + 1, BLOCK_SIZE):
            named = repr((names[-1:], content[start : start + BLOCK_SIZE])).encode()
            names.append(sha256(named).digest())
        return names

    def write(self, name: str, position: int) -> None:
        """Write new tokens from `position` to the end of the sequence, as a step would."""
        for index in range(position, len(self.contents[name])):
            self.num_writes += 1
            self.contents[name][index] = self.num_writes
            block_id = self.kv.block_ids(name)[index // BLOCK_SIZE]
            self.memory[block_id][index % BLOCK_SIZE] = self.num_writes

    def grow(self, name: str, num_tokens: int) -> bool:
        """Allocate in both; whether it fits, which the model decides on its own."""
        table = self.tables.get(name, [])
        missing = max(0, -(-num_tokens // BLOCK_SIZE) - len(table))
        fits = missing <= self.num_free and len(table) + missing <= MAX_BLOCKS
        fits = fits and (name in self.tables or len(self.tables) < NUM_ROWS)
        assert self.kv.allocate(name, num_tokens) == fits
        if fits:
            self.tables[name] = table + self.take(missing)
            self.num_published.setdefault(name, 0)
            known = self.contents.setdefault(name, [])
            known += [0] * (num_tokens - len(known))
        return fits

    @rule(target=sequences, num_tokens=st.integers(1, MAX_BLOCKS * BLOCK_SIZE + 2))
    def start(self, num_tokens: int) -> str:
        self.num_names += 1
        name = f"s{self.num_names}"
        if self.grow(name, num_tokens):
            self.write(name, 0)
        return name

    @rule(name=sequences, more=st.integers(0, 5))
    def extend(self, name: str, more: int) -> None:
        if name not in self.tables:
            return
        end = len(self.contents[name])
        if more == 0:
            assert self.kv.allocate(name, max(0, end - 1)), "asking for less is fine"
        elif self.own(name, end) and self.grow(name, end + more):
            self.write(name, end)

    @rule(name=sequences, back=st.integers(1, 8))
    def rewrite_the_tail(self, name: str, back: int) -> None:
        if name in self.tables:
            position = max(0, len(self.contents[name]) - back)
            if self.own(name, position):
                self.write(name, position)

    def own(self, name: str, position: int) -> bool:
        """Copy on write in both; False if too few blocks are free."""
        table, held = self.tables[name], self.ref_counts()
        shared = [i for i in range(position // BLOCK_SIZE, len(table)) if held[table[i]] > 1]
        copies = self.kv.copy_on_write(name, position)
        if len(shared) > self.num_free:
            assert copies is None
            return False
        own, sources = self.take(len(shared)), [table[i] for i in shared]
        assert copies == tuple(zip(sources, own, strict=True))
        for i, block_id in zip(shared, own, strict=True):
            table[i] = block_id
        self.release(sources)
        first = position // BLOCK_SIZE
        for block_id in table[first:]:
            self.names.pop(block_id, None)
        self.num_published[name] = min(self.num_published[name], first)
        for copy in copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        return True

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: str) -> str:
        self.num_names += 1
        child = f"s{self.num_names}"
        if parent in self.tables:
            fits = len(self.tables) < NUM_ROWS
            assert self.kv.fork(parent, child) == fits
            if fits:
                self.tables[child] = list(self.tables[parent])
                self.contents[child] = list(self.contents[parent])
                self.num_published[child] = self.num_published[parent]
        return child

    @rule(name=sequences, back=st.integers(-2, 10))
    def rewind(self, name: str, back: int) -> None:
        if name not in self.tables:
            return
        end = max(0, len(self.contents[name]) - back)
        if end > len(self.contents[name]):
            with pytest.raises(RewindError) as refusal:
                self.kv.rewind(name, end)
            assert refusal.value.fault is RewindFault.POSITION_BEYOND_END
            return
        self.kv.rewind(name, end)
        kept = -(-end // BLOCK_SIZE)
        dropped = self.tables[name][kept:]
        self.num_published[name] = min(self.num_published[name], kept)
        del self.tables[name][kept:], self.contents[name][end:]
        self.release(dropped[::-1])

    @rule(name=consumes(sequences))
    def finish(self, name: str) -> None:
        if name in self.tables:
            self.kv.free(name)
            table = self.tables.pop(name)
            del self.contents[name], self.num_published[name]
            self.release(table[::-1])

    @rule(name=sequences)
    def publish(self, name: str) -> None:
        """Let all its full blocks be found. Blocks once published are not written again without asking."""
        if name in self.tables:
            hashes = self.hashes(self.contents[name])
            self.kv.publish(name, hashes, len(hashes))
            for index in range(self.num_published[name], len(hashes)):
                if hashes[index] not in self.names.values():
                    self.names[self.tables[name][index]] = hashes[index]
            self.num_published[name] = max(self.num_published[name], len(hashes))

    @rule(target=sequences, parent=sequences, length=st.integers(1, MAX_BLOCKS * BLOCK_SIZE))
    def start_on_what_is_found(self, parent: str, length: int) -> str:
        """A new sequence that begins with the tokens of another, which may be gone."""
        self.num_names += 1
        name = f"s{self.num_names}"
        if parent not in self.tables:
            return name
        prefix = self.contents[parent][:length]
        block_of = {block_hash: block_id for block_id, block_hash in self.names.items()}
        hashes = self.hashes(prefix)
        found = []
        for block_hash in hashes:
            if block_hash not in block_of:
                break
            found.append(block_of[block_hash])
        assert self.kv.prefixes.find(hashes, len(hashes)) == found
        missing = -(-length // BLOCK_SIZE) - len(found)
        num_kept = sum(block_id in self.kept for block_id in found)
        fits = missing <= self.num_free - num_kept and len(self.tables) < NUM_ROWS
        assert self.kv.start(name, length, found) == fits
        if fits:
            for block_id in found:
                if block_id in self.kept:
                    self.kept.remove(block_id)
            self.tables[name] = found + self.take(missing)
            self.num_published[name] = len(found)
            start = len(found) * BLOCK_SIZE
            self.contents[name] = prefix[:start] + [0] * (length - start)
            self.write(name, start)
        return name

    @rule(name=sequences)
    def mark_bad(self, name: str) -> None:
        if name in self.tables:
            self.kv.mark_kv_bad(name)
            for block_id in self.tables[name]:
                self.names.pop(block_id, None)
            self.num_published[name] = 0

    @rule()
    def reset(self) -> None:
        assert self.kv.prefixes.reset() == len(self.kept)
        for block_id in self.kept:
            del self.names[block_id]
        self.free += self.kept
        self.kept = []

    @invariant()
    def ids_and_order_are_the_models(self) -> None:
        assert free_block_ids(self.kv.pool) == (*self.free, *self.kept)
        assert self.kv.pool.num_free_kept == len(self.kept)
        assert self.names == self.kv.pool.kept
        for name in self.tables:
            assert self.kv.num_published(name) == self.num_published[name]
        held = self.ref_counts()
        assert [self.kv.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [held[b] for b in range(NUM_BLOCKS)]
        assert self.kv.pool.num_free + self.kv.num_used_blocks == NUM_BLOCKS
        rows = {name: self.kv.row(name) for name in self.tables}
        assert len(set(rows.values())) == len(rows)
        for name, table in self.tables.items():
            assert self.kv.block_ids(name) == tuple(table)
            assert self.kv.block_tables[rows[name]].tolist() == table + [0] * (MAX_BLOCKS - len(table))
        self.kv.check_integrity()

    @invariant()
    def what_is_found_is_what_was_asked_for(self) -> None:
        for name, content in self.contents.items():
            hashes = self.hashes(content)
            found = self.kv.prefixes.find(hashes, len(hashes))
            memory = [token for block_id in found for token in self.memory[block_id]]
            assert memory == content[: len(memory)], name

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for name, content in self.contents.items():
            memory = [token for block_id in self.kv.block_ids(name) for token in self.memory[block_id]]
            assert memory[: len(content)] == content

    def teardown(self) -> None:
        for name in list(self.tables):
            self.finish(name)
        assert sorted(self.free + self.kept) == list(range(NUM_BLOCKS))
        self.ids_and_order_are_the_models()


def test_kv() -> None:
    run_state_machine_as_test(
        KvMachine, settings=settings(max_examples=share_of(200), stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kv_for_long() -> None:
    run_state_machine_as_test(
        KvMachine, settings=settings(max_examples=5000, stateful_step_count=200, deadline=None)
    )
