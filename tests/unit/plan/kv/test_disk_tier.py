"""What goes to disk and comes from there, as the scheduler sees it: ids, counts, and who waits for what."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan.kv.disk_tier import BlockBatch, DiskLookUp, DiskTier
from engine.plan.kv.prefix_cache import extend_block_hashes
from engine.plan.request import FinishReason
from engine.plan.scheduling.batcher import ContinuousBatcher
from tests.support.factories import make_batcher, make_request, make_runner, run_step, shape_of
from tests.support.fakes import FakeRunner, expected_output

PROMPT = list(range(18))  # four full blocks and two tokens


class Disk:
    """A batcher with a disk behind it that answers when it is told to; it has the blocks named in `names`."""

    def __init__(self, **limits: Any) -> None:
        self.batcher: ContinuousBatcher = make_batcher(prefix_caching=True, **limits)
        self.runner: FakeRunner = make_runner(self.batcher)
        self.tier = DiskTier(self.batcher.kv, self.batcher.rates)
        self.batcher.running.lookup.disk = self.tier
        self.look_ups: list[DiskLookUp] = []
        self.tier.on_look_up = self.look_ups.append

    def names_of(self, look_up: DiskLookUp, num_stored: int) -> list[bytes]:
        """The first names of what is looked for, so many of them stored."""
        names: list[bytes] = []
        extend_block_hashes(names, look_up.token_ids, 4, look_up.num_blocks, look_up.salt)
        return names[: look_up.num_found + num_stored]

    def go_on(self, request_id: str) -> None:
        """The request waits for the disk no longer."""
        self.tier.end_asking(request_id)
        self.batcher.resume(request_id)

    def answer(self, num_stored: int, num_good: int | None = None) -> BlockBatch | None:
        """Answer the oldest look-up: so many are stored, and so many of those good; what was read."""
        look_up = self.look_ups.pop(0)
        read = self.tier.begin_read(look_up.request_id, self.names_of(look_up, num_stored))
        if read is not None:
            self.tier.end_read(read, num_stored if num_good is None else num_good, 0.001)
        self.go_on(look_up.request_id)
        return read

    def run_all(self) -> None:
        """Run until nothing is left."""
        for _ in range(200):
            if not self.batcher.has_work:
                break
            run_step(self.batcher, self.runner)
            self.batcher.kv.check_integrity()
        assert self.batcher.kv.num_used_blocks == 0


def test_a_request_is_held_until_the_disk_has_answered() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT))
    assert disk.look_ups == [DiskLookUp("a", tuple(PROMPT[:16]), None, 0, 4, None)]
    assert disk.batcher.waits_for_disk
    assert disk.batcher.step().inputs is None
    explanation = disk.batcher.explain("a")
    assert explanation is not None
    assert "read from disk" in str(explanation.waits_because)
    disk.answer(num_stored=0)
    assert not disk.batcher.waits_for_disk
    assert shape_of(run_step(disk.batcher, disk.runner)[0]) == [("a", 0, 18, True)]


def test_what_is_read_is_found_as_if_it_had_been_computed() -> None:
    disk = Disk()
    request = make_request("a", PROMPT)
    disk.batcher.add(request)
    read = disk.answer(num_stored=3)
    assert read is not None
    assert read.block_ids == [0, 1, 2]
    assert shape_of(disk.batcher.step()) == [("a", 12, 6, True)]
    assert request.num_cached_tokens == 12
    assert disk.batcher.kv.block_ids("a")[:3] == (0, 1, 2)


def test_only_what_is_not_in_memory_is_read() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT[:10], max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    disk.batcher.add(make_request("b", PROMPT, arrival=1))
    assert disk.look_ups[0].num_found == 2
    read = disk.answer(num_stored=2)
    assert read is not None
    assert len(read.block_ids) == 2
    assert shape_of(disk.batcher.step()) == [("b", 16, 2, True)]


def test_damaged_blocks_are_cleaned_and_those_behind_them_not_found() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT))
    read = disk.answer(num_stored=4, num_good=1)
    assert read is not None
    decision = disk.batcher.step()
    assert decision.inputs is not None
    assert set(decision.inputs.moves.scrub_blocks) == set(read.block_ids[1:])
    assert shape_of(decision) == [("a", 4, 14, True)]


def test_computing_is_preferred_where_it_is_faster() -> None:
    disk = Disk()
    disk.batcher.rates.seed([(0, 1, 0.001), (64, 0, 0.065)])  # a millisecond a token
    disk.batcher.add(make_request("a", PROMPT))
    look_up = disk.look_ups.pop()
    assert look_up.limit_s == pytest.approx(0.016, rel=0.1)
    read = disk.tier.begin_read("a", disk.names_of(look_up, 4))
    assert read is not None, "once, to find out"
    disk.tier.end_read(read, 4, seconds=10.0)
    disk.batcher.kv.prefixes.reset()
    assert disk.tier.begin_read("a", disk.names_of(look_up, 4)) is None


def test_a_disk_that_stalled_once_is_read_again_in_time() -> None:
    disk = Disk()
    disk.batcher.rates.seed([(0, 1, 0.001), (64, 0, 0.065)])
    disk.batcher.add(make_request("a", PROMPT))
    names = disk.names_of(disk.look_ups.pop(), 4)

    def num_refused() -> int:
        """How often it is not read before it is, which takes a millisecond."""
        disk.batcher.kv.prefixes.reset()
        for i in range(1000):
            if (read := disk.tier.begin_read("a", names)) is not None:
                disk.tier.end_read(read, 4, seconds=0.001)
                return i
        return 1000

    assert num_refused() == 0
    disk.batcher.kv.prefixes.reset()
    read = disk.tier.begin_read("a", names)
    assert read is not None
    disk.tier.end_read(read, 4, seconds=2.0)
    assert 20 < num_refused() < 200
    assert [num_refused() for _ in range(20)][-1] == 0


def test_little_is_not_looked_for() -> None:
    disk = Disk()
    disk.batcher.rates.seed([(0, 1, 0.001), (64, 0, 0.0065)])
    disk.batcher.add(make_request("a", PROMPT))
    assert disk.look_ups == []
    disk.run_all()


def test_requests_that_end_while_they_are_held_leave_nothing() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT))
    look_up = disk.look_ups.pop()
    read = disk.tier.begin_read("a", disk.names_of(look_up, 4))
    assert read is not None
    disk.batcher.finish("a", FinishReason.ABORT)
    assert disk.batcher.kv.num_used_blocks == 4
    disk.batcher.kv.check_integrity()
    disk.tier.end_read(read, 4, 0.001)
    disk.go_on("a")
    disk.batcher.kv.check_integrity()
    assert (disk.batcher.kv.num_used_blocks, disk.batcher.has_work) == (0, False)


def test_forks_and_scored_prompts_are_not_looked_for() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT, fork_of="other"))
    disk.batcher.add(make_request("b", PROMPT, arrival=1, prompt_logprobs=1))
    assert disk.look_ups == []


def test_every_published_block_is_written_once_and_its_ancestors_touched() -> None:
    disk = Disk()
    calls: list[str] = []
    disk.tier.on_unwritten = lambda: calls.append("unwritten")
    disk.batcher.add(make_request("a", PROMPT, max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    assert calls
    first = disk.tier.begin_write(3)
    assert list(first.block_ids) == [0, 1, 2]
    disk.tier.end_write()
    second = disk.tier.begin_write(3)
    assert list(second.block_ids) == [3]
    disk.tier.end_write()
    assert disk.tier.begin_write(3).names == []
    disk.batcher.add(make_request("b", [*PROMPT, 90, 91, 92], arrival=1, max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    assert list(disk.tier.take_touched()) == [*first.names, *second.names]
    assert len(disk.tier.begin_write(3).names) == 1


def test_what_is_taken_while_it_is_written_is_told() -> None:
    disk = Disk(num_blocks=8, max_model_len=32)
    disk.batcher.add(make_request("a", PROMPT, max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    batch = disk.tier.begin_write(16)
    assert all(map(disk.tier.is_unchanged, batch.block_ids))
    disk.batcher.kv.prefixes.withdraw(batch.block_ids[0])
    disk.batcher.kv.pool.take(7)
    unchanged = [disk.tier.is_unchanged(block_id) for block_id in batch.block_ids]
    assert unchanged == [False, True, False, False], "a prefix is reused last"


def test_what_left_memory_before_its_turn_is_not_written() -> None:
    disk = Disk()
    disk.batcher.add(make_request("a", PROMPT, max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    disk.batcher.kv.prefixes.reset()
    assert disk.tier.begin_write(16).names == []


def test_a_preempted_request_comes_back_from_disk_when_there_is_room() -> None:
    disk = Disk(num_blocks=12, max_model_len=40, max_num_seqs=2, preemption="swap")  # and no room on the host
    requests = [
        make_request("a", 16, arrival=1, max_tokens=20),
        make_request("b", 16, arrival=2, max_tokens=20),
    ]
    stored: set[bytes] = set()

    def write() -> None:
        while (batch := disk.tier.begin_write(16)).names:
            stored.update(batch.names)
            disk.tier.end_write()

    disk.tier.on_unwritten = write
    for request in requests:
        disk.batcher.add(request)
    asked: list[tuple[str, int]] = []
    for _ in range(200):
        while disk.look_ups:
            look_up = disk.look_ups[0]
            asked.append((look_up.request_id, look_up.num_blocks))
            disk.answer(num_stored=0)
        if not disk.batcher.has_work:
            break
        run_step(disk.batcher, disk.runner)
        disk.batcher.kv.check_integrity()
    assert requests[1].num_preemptions == 1
    assert [name for name, _ in asked] == ["a", "b", "b"]
    assert asked[-1][1] > 3, "its output, too"
    for request in requests:
        assert request.output_token_ids == expected_output(request.token_ids[:16], 20)
    assert len(stored) >= 14


def test_a_block_that_a_step_is_to_zero_is_not_read_into() -> None:
    disk = Disk(num_blocks=8, max_model_len=32)
    kv = disk.batcher.kv
    kv.scrub([2])  # free, and perhaps not finite
    disk.batcher.add(make_request("b", [1, 2], max_tokens=2))
    decision = disk.batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.scrub_blocks == (2,)
    assert kv.reserve(6) is None, "the device may not have come to it"
    disk.batcher.commit(decision, disk.runner.run(decision.inputs).rows)
    assert kv.reserve(6) is not None
    kv.check_integrity()


def test_a_block_to_be_zeroed_is_read_into_while_nothing_runs() -> None:
    disk = Disk(num_blocks=8, max_model_len=32)
    disk.batcher.kv.scrub(range(8))  # left by somebody who has gone, and no step comes that zeroes them
    disk.batcher.add(make_request("a", PROMPT))
    read = disk.answer(num_stored=4, num_good=3)
    assert read is not None
    decision = disk.batcher.step()
    assert shape_of(decision) == [("a", 12, 6, True)]
    assert decision.inputs is not None
    zeroed = set(decision.inputs.moves.scrub_blocks)
    assert zeroed == set(range(8)) - set(read.block_ids[:3]), "the damaged one, too"


def test_a_block_that_is_yet_to_be_saved_on_the_host_is_not_read_into() -> None:
    disk = Disk(num_blocks=16, max_model_len=56, max_num_seqs=3, num_host_blocks=32, preemption="swap")
    older = make_request("a", 20, arrival=1, max_tokens=30)
    for request in (older, make_request("b", 24, arrival=3, max_tokens=30)):
        disk.batcher.add(request)
        disk.answer(num_stored=0)
    decision = disk.batcher.step()
    while decision.inputs is not None and not decision.swapped:
        disk.batcher.commit(decision, disk.runner.run(decision.inputs).rows)
        decision = disk.batcher.step()
    assert decision.inputs is not None
    assert decision.inputs.moves.swap_out, "its blocks are free, and the step that saves them is out"
    disk.batcher.add(make_request("c", range(200, 217), arrival=9))
    assert disk.answer(num_stored=4) is None
    disk.batcher.commit(decision, disk.runner.run(decision.inputs).rows)
    disk.batcher.kv.check_integrity()
    assert disk.batcher.kv.reserve(4) is not None


def test_a_block_that_a_fork_is_yet_to_copy_is_not_read_into() -> None:
    """The parent may end while the step that copies its last block is out, and be no part of it."""
    disk = Disk(num_blocks=24, max_model_len=40, max_decode_seqs=1)
    batcher, kv = disk.batcher, disk.batcher.kv
    batcher.add(make_request("earlier", range(300, 317), max_tokens=1))
    disk.answer(num_stored=0)
    disk.run_all()
    other, parent = make_request("b", [1, 2], arrival=1), make_request("a", PROMPT, arrival=2)
    for request in (other, parent):
        batcher.add(request)
    disk.answer(num_stored=0)
    run_step(batcher, disk.runner)
    fork = make_request("c", PROMPT, arrival=3, fork_of="a")
    batcher.add(fork)
    decision = batcher.step()
    assert decision.inputs is not None
    assert shape_of(decision) == [("b", 2, 1, True), ("c", 17, 1, True)]
    (copy,) = decision.inputs.moves.block_copies
    batcher.finish("a", FinishReason.DEADLINE)
    num_plain = kv.pool.num_free - kv.pool.num_free_kept
    assert kv.pool.ref_count(copy.source) == 0
    assert kv.reserve(num_plain) is None, "the device may not have come to it"
    batcher.commit(decision, disk.runner.run(decision.inputs).rows)
    taken = kv.reserve(num_plain)
    assert taken is not None and copy.source in taken
    kv.unreserve(taken)
    disk.run_all()
    assert fork.output_token_ids == expected_output(PROMPT, 8)
