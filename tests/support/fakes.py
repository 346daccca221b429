"""Stand-ins that let the whole loop run without a model, and still know the right answer.

The fake model's next token is a hash of the whole prefix, which it reads back from a fake paged KV through
the block tables, as the real one does: a wrong slot, table, copy or rewind gives a wrong token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine.plan.step_records import SampledRows, StepInputs, StepResult

VOCAB_SIZE = 257
NO_TOKEN = -1
POISON = -2
STALE = -3  # a rejected draft's
NO_TOKEN_DRAWN = -1


def next_token(prefix: Sequence[int], seed: int = 0) -> int:
    """The fake model: a polynomial hash of seed and prefix, scrambled, in [0, VOCAB_SIZE)."""
    state = 1469598103 ^ seed
    for token in prefix:
        state = (state * 1000003 ^ (int(token) + 7)) & 0xFFFFFFFFFFFF
    state ^= state >> 23
    return (state * 0x9E3779B1 >> 11) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What plain serial generation gives."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """A StepRunner over a fake paged KV. `before` is called with each step's inputs and may raise or block.

    `after` is called when all has been written, and may raise; `on_draw` with the step as it is drawn, too.
    `row_errors(step, row)` may name an error for
    a row. What a failed step or row wrote is POISON from then on, which nobody may read, not even behind a
    mask; a step that ran out of memory wrote good values, perhaps. `seconds(inputs)` is what a step is said
    to take, and to swap. `instant` skips the hashing, to time the host alone.
    """

    num_blocks: int
    block_size: int
    before: Callable[[StepInputs], None] | None = None
    row_errors: Callable[[int, int], str | None] | None = None
    after: Callable[[StepInputs], None] | None = None
    on_draw: Callable[[StepInputs], None] | None = None
    seconds: Callable[[StepInputs], tuple[float, float]] | None = None
    instant: bool = False
    num_host_blocks: int = 0
    violations: list[str] = field(default_factory=list)  # of what nobody may do, also in passes that failed
    num_steps: int = 0
    max_tokens_seen: int = 0
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0
    slots: np.ndarray = field(init=False)
    host_slots: np.ndarray = field(init=False)
    thread_names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.slots = np.full(self.num_blocks * self.block_size, NO_TOKEN, dtype=np.int64)
        self.host_slots = np.full((self.num_host_blocks, self.block_size), NO_TOKEN, dtype=np.int64)

    def run(self, inputs: StepInputs) -> StepResult:
        """Write the step's tokens, then hash each sampled row's prefix."""
        self.run_pass(inputs)
        return self.run_draw(inputs)

    def run_pass(self, inputs: StepInputs) -> None:
        """The first half of `run`."""
        self.num_steps += 1
        self.thread_names.add(threading.current_thread().name)
        if self.before is not None:
            with self._noting_violations():
                self.before(inputs)
        if not self.instant:
            with self._noting_violations():
                self._pass(inputs)

    def run_draw(self, inputs: StepInputs) -> StepResult:
        """The second half, of the step that passed last."""
        if self.instant:
            return StepResult(SampledRows([5] * len(inputs.logits_rows)), 0.0, 0.0)
        with self._noting_violations():
            rows = self._sample(inputs)
        forward_s, swap_s = self.seconds(inputs) if self.seconds else (0.0, 0.0)
        num_swapped = len(inputs.moves.swap_out) + len(inputs.moves.swap_in)
        return StepResult(rows, forward_s, 0.0, swap_s, num_swapped * self.block_size)

    @contextmanager
    def _noting_violations(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as violation:
            self.violations.append(str(violation))
            raise

    def _pass(self, inputs: StepInputs) -> None:
        """Move blocks and write the step's tokens."""
        self.max_tokens_seen = max(self.max_tokens_seen, len(inputs.token_ids))
        self._prepare(inputs)
        self.slots[inputs.slot_mapping] = inputs.token_ids
        if self.after is not None:
            try:
                self.after(inputs)
            except RuntimeError:
                self.slots[inputs.slot_mapping] = POISON
                raise

    def _sample(self, inputs: StepInputs) -> SampledRows:
        drawn: list[int] = []
        errors: dict[int, str] = {}
        ends = np.cumsum(inputs.query_lens)
        counted = {each.row: each.history for each in inputs.sampling.adjustments if each.history is not None}
        if self.on_draw is not None:
            self.on_draw(inputs)
        for row, token_row in enumerate(inputs.logits_rows):
            sequence = int(np.searchsorted(ends, token_row, side="right"))
            prefix = self._prefix(
                inputs, sequence, int(token_row - ends[sequence] + inputs.query_lens[sequence])
            )
            assert len(prefix) == inputs.sampling.position[row], "a row's position is not its depth"
            if row in counted:
                seen = counted[row].token_ids.tolist()
                assert sorted(seen) == sorted(set(prefix)), "penalties are not of the tokens before the row"
            seed = int(inputs.sampling.seed[row]) if inputs.sampling.temperature[row] else 0  # greedy
            drawn.append(next_token(prefix, seed))
            error = self.row_errors(self.num_steps, row) if self.row_errors else None
            if error is not None:
                errors[row] = error
                if inputs.drafts is None or sequence not in inputs.drafts.sequence:
                    written = slice(ends[sequence] - inputs.query_lens[sequence], ends[sequence])
                    self.slots[inputs.slot_mapping[written]] = POISON
        return self._verify(inputs, drawn, errors)

    def _prefix(self, inputs: StepInputs, sequence: int, index: int) -> list[int]:
        """The tokens that the sequence's query token of this index sees, itself included."""
        num_known = int(inputs.kv_lens[sequence] - inputs.query_lens[sequence])
        table = inputs.block_tables[sequence]
        drafts = inputs.drafts
        if drafts is None or drafts.parents is None or sequence not in drafts.sequence:
            return self._read(table, num_known + index + 1)
        tokens = self._read(table, int(inputs.kv_lens[sequence]))
        parents = _split(drafts.parents, drafts.num_drafts)[drafts.sequence.tolist().index(sequence)]
        path: list[int] = []
        node = index - 1
        while node >= 0:
            path.append(node)
            node = int(parents[node])
        return tokens[: num_known + 1] + [tokens[num_known + 1 + node] for node in reversed(path)]

    def _verify(self, inputs: StepInputs, drawn: list[int], errors: dict[int, str]) -> SampledRows:
        """What a verifier gives: a sequence's tokens in order, then NO_TOKEN; a path's K/V laid straight."""
        drafts = inputs.drafts
        if drafts is None:
            return SampledRows(drawn, row_errors=errors or None)
        token_ids, row_errors = list(drawn), dict(errors)
        spoiled: list[int] = []
        all_parents = drafts.parents if drafts.parents is not None else None
        ends = np.cumsum(inputs.query_lens)
        for v, sequence in enumerate(drafts.sequence.tolist()):
            first, count = int(drafts.first_row[v]), int(drafts.num_drafts[v])
            own = _split(drafts.token_ids, drafts.num_drafts)[v].tolist()
            parents = list(range(-1, count - 1))
            if all_parents is not None:
                parents = _split(all_parents, drafts.num_drafts)[v].tolist()
            path = [-1]
            while first + path[-1] + 1 not in errors:
                token = drawn[first + path[-1] + 1]
                child = [i for i in range(count) if parents[i] == path[-1] and own[i] == token]
                if not child:
                    break
                path.append(child[0])
            rows = [first + node + 1 for node in path]
            lost = [row for row in range(first, first + count + 1) if row in errors and row not in rows]
            spoiled += lost
            for place, row in enumerate(range(first, first + count + 1)):
                row_errors.pop(row, None)
                token_ids[row] = NO_TOKEN_DRAWN
                if place < len(rows):
                    token_ids[row] = drawn[rows[place]]
                    if rows[place] in errors:
                        row_errors[row] = errors[rows[place]]
            slots = inputs.slot_mapping[ends[sequence] - inputs.query_lens[sequence] : ends[sequence]]
            accepted = self.slots[slots[[node + 1 for node in path]]]
            self.slots[slots[: len(path)]] = accepted
            self.slots[slots[len(path) :]] = STALE
            self.slots[[slots[row - first] for row in lost if row - first >= len(path)]] = POISON
            if rows[-1] in errors:  # the rows before it were drawn from good values
                self.slots[slots[len(path) - 1 :]] = POISON
        return SampledRows(token_ids, row_errors=row_errors or None, spoiled_rows=tuple(spoiled))

    def _prepare(self, inputs: StepInputs) -> None:
        moves = inputs.moves
        by_block = self.slots.reshape(self.num_blocks, self.block_size)
        saved = _distinct(copy.target for copy in moves.swap_out)
        for copy in moves.swap_out:
            self.host_slots[copy.target] = by_block[copy.source]
        for block in moves.scrub_blocks:
            by_block[block] = NO_TOKEN
        written = _distinct(copy.target for copy in (*moves.block_copies, *moves.swap_in))
        assert not written & {copy.source for copy in moves.block_copies}, "a copy's source is overwritten"
        for copy in moves.block_copies:
            by_block[copy.target] = by_block[copy.source]
        assert not saved & {copy.source for copy in moves.swap_in}, "what is brought back is overwritten"
        for copy in moves.swap_in:
            by_block[copy.target] = self.host_slots[copy.source]
        self.num_swapped_out += len(moves.swap_out)
        self.num_swapped_in += len(moves.swap_in)

    def _read(self, table: Sequence[int], length: int) -> list[int]:
        num_blocks = -(-length // self.block_size)
        slots = self.slots.reshape(self.num_blocks, self.block_size)[table[:num_blocks]].ravel()
        assert POISON not in slots, "the model read a block that another request's fault has spoiled"
        tokens: list[int] = slots[:length].tolist()
        assert NO_TOKEN not in tokens, "the model read a slot nobody wrote"
        assert STALE not in tokens, "the model read what a rejected draft has left"
        return tokens


def _split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(counts)[:-1])


def _distinct(blocks: Iterable[int]) -> set[int]:
    listed = list(blocks)
    assert len(set(listed)) == len(listed), f"blocks {sorted(listed)} are written more than once"
    return set(listed)


class Hang:
    """Holds the given step in the middle until released."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self.step -= 1
        if self.step == 0:
            self.entered.set()
            assert self.release.wait(10)


class ManualClock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds
