"""PagedKvManager against a model made of plain lists: exact ids, exact order, and the right contents."""

from __future__ import annotations

from collections import Counter

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
from engine.kv.paged_kv_manager import PagedKvManager

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS = 12, 3, 5, 6


class KvMachine(RuleBasedStateMachine):
    """The model: a free list, a list of blocks for each sequence, and a memory of what was written."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.kv = PagedKvManager(NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS)
        self.free = list(range(NUM_BLOCKS))
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
        self.free += [block_id for block_id in block_ids if not held[block_id]]

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
        fits = missing <= len(self.free) and len(table) + missing <= MAX_BLOCKS
        fits = fits and (name in self.tables or len(self.tables) < NUM_ROWS)
        assert self.kv.allocate(name, num_tokens) == fits
        if fits:
            self.tables[name] = table + self.free[:missing]
            del self.free[:missing]
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
        if len(shared) > len(self.free):
            assert copies is None
            return False
        assert copies == tuple((table[i], self.free[n]) for n, i in enumerate(shared))
        sources = [table[i] for i in shared]
        for n, i in enumerate(shared):
            table[i] = self.free[n]
        del self.free[: len(shared)]
        self.release(sources)
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
        del self.tables[name][kept:], self.contents[name][end:]
        self.release(dropped[::-1])

    @rule(name=consumes(sequences))
    def finish(self, name: str) -> None:
        if name in self.tables:
            self.kv.free(name)
            table = self.tables.pop(name)
            del self.contents[name]
            self.release(table[::-1])

    @invariant()
    def ids_and_order_are_the_models(self) -> None:
        assert self.kv.pool.free_block_ids() == tuple(self.free)
        held = self.ref_counts()
        assert [self.kv.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [held[b] for b in range(NUM_BLOCKS)]
        assert self.kv.num_free_blocks + self.kv.num_used_blocks == NUM_BLOCKS
        rows = {name: self.kv.row(name) for name in self.tables}
        assert len(set(rows.values())) == len(rows)
        for name, table in self.tables.items():
            assert self.kv.block_ids(name) == tuple(table)
            assert self.kv.block_tables[rows[name]].tolist() == table + [0] * (MAX_BLOCKS - len(table))
        self.kv.check_integrity()

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for name, content in self.contents.items():
            memory = [token for block_id in self.kv.block_ids(name) for token in self.memory[block_id]]
            assert memory[: len(content)] == content

    def teardown(self) -> None:
        for name in list(self.tables):
            self.finish(name)
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        self.ids_and_order_are_the_models()


def test_kv() -> None:
    run_state_machine_as_test(
        KvMachine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kv_for_long() -> None:
    run_state_machine_as_test(
        KvMachine, settings=settings(max_examples=5000, stateful_step_count=200, deadline=None)
    )
