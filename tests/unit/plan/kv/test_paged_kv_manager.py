from collections.abc import Callable

import pytest

from engine.errors import RewindError, RewindFault
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.step_records import BlockCopy
from tests.support.factories import free_block_ids, make_kv


def ref_counts(kv: PagedKvManager) -> list[int]:
    return [kv.pool.ref_count(block_id) for block_id in range(kv.num_blocks)]


def test_allocate_grows_block_by_block_and_publishes_the_table() -> None:
    kv = make_kv(num_blocks=8, block_size=4)
    assert kv.allocate("a", 5)
    assert kv.allocate("b", 1)
    assert kv.allocate("a", 8)  # still two blocks
    assert kv.allocate("a", 9)
    assert kv.block_ids("a") == (0, 1, 3)
    assert kv.block_ids("b") == (2,)
    assert (kv.row("a"), kv.row("b")) == (0, 1)
    assert kv.block_tables[0].tolist() == [0, 1, 3, 0, 0, 0, 0, 0]
    assert kv.block_tables[1].tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    assert kv.num_used_blocks == 4
    assert kv.pool.num_free == 4
    assert kv.usage == 0.5
    kv.check_integrity()


def test_allocate_never_shrinks() -> None:
    kv = make_kv()
    assert kv.allocate("a", 9)
    assert kv.allocate("a", 2)
    assert kv.block_ids("a") == (0, 1, 2)


def test_what_does_not_fit_changes_nothing() -> None:
    kv = make_kv(num_blocks=4, block_size=4, max_num_seqs=2, max_blocks_per_seq=3)
    assert not kv.allocate("a", 13), "longer than a table"
    assert "a" not in kv
    assert kv.allocate("a", 12)
    assert not kv.allocate("b", 5), "one block is free"
    assert "b" not in kv
    assert kv.allocate("b", 4)
    assert not kv.allocate("b", 5)
    assert kv.block_ids("b") == (3,)
    kv.free("a")
    assert kv.allocate("c", 4)
    assert not kv.allocate("d", 4), "no row is free"
    assert kv.pool.num_free == 2
    kv.check_integrity()


def test_free_releases_the_last_block_first_and_returns_the_row() -> None:
    kv = make_kv(num_blocks=6, block_size=2)
    kv.allocate("a", 6)
    kv.allocate("b", 2)
    kv.free("a")
    assert free_block_ids(kv.pool) == (4, 5, 2, 1, 0)
    assert "a" not in kv
    assert kv.block_tables[0].tolist() == [0] * 6
    kv.allocate("c", 2)
    assert (kv.row("c"), kv.block_ids("c")) == (0, (4,))
    with pytest.raises(KeyError):
        kv.free("a")


def test_limits_of_one_sequence() -> None:
    kv = make_kv(num_blocks=4, block_size=4, max_blocks_per_seq=100)
    assert kv.max_tokens_per_seq == 16
    assert make_kv(num_blocks=100, block_size=4, max_blocks_per_seq=3).max_tokens_per_seq == 12
    assert [kv.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_fork_shares_every_block() -> None:
    kv = make_kv(max_num_seqs=2)
    kv.allocate("parent", 6)
    assert kv.fork("parent", "child")
    assert kv.block_ids("child") == (0, 1)
    assert kv.row("child") == 1
    assert kv.block_tables[1].tolist() == kv.block_tables[0].tolist()
    assert ref_counts(kv)[:3] == [2, 2, 0]
    assert kv.num_used_blocks == 2
    assert not kv.fork("parent", "another"), "no row is free"
    kv.check_integrity()
    kv.free("parent")
    assert kv.num_used_blocks == 2
    kv.free("child")
    assert kv.num_used_blocks == 0
    kv.check_integrity()


def test_a_fork_grows_on_its_own() -> None:
    kv = make_kv(block_size=4)
    kv.allocate("parent", 8)
    kv.fork("parent", "child")
    kv.allocate("child", 9)
    kv.allocate("parent", 9)
    assert kv.block_ids("child") == (0, 1, 2)
    assert kv.block_ids("parent") == (0, 1, 3)


def test_copy_on_write_copies_only_shared_blocks_from_the_position_on() -> None:
    kv = make_kv(block_size=4)
    kv.allocate("parent", 10)
    kv.fork("parent", "child")
    kv.allocate("child", 13)
    assert kv.block_ids("child") == (0, 1, 2, 3)
    assert kv.copy_on_write("child", 12) == ()
    assert kv.copy_on_write("child", 6) == (BlockCopy(1, 4), BlockCopy(2, 5))
    assert kv.block_ids("child") == (0, 4, 5, 3)
    assert kv.block_tables[1].tolist()[:4] == [0, 4, 5, 3]
    assert kv.block_ids("parent") == (0, 1, 2)
    assert ref_counts(kv) == [2, 1, 1, 1, 1, 1, 0, 0]
    assert kv.copy_on_write("child", 6) == ()
    assert kv.copy_on_write("parent", 4) == (), "the parent is the only holder by now"
    kv.check_integrity()


def test_copy_on_write_without_a_free_block_changes_nothing() -> None:
    kv = make_kv(num_blocks=3, block_size=4)
    kv.allocate("parent", 8)
    kv.fork("parent", "child")
    assert kv.copy_on_write("child", 0) is None
    assert kv.block_ids("child") == (0, 1)
    assert free_block_ids(kv.pool) == (2,)
    assert kv.copy_on_write("child", 7) == (BlockCopy(1, 2),)
    kv.check_integrity()


def test_rewind_releases_whole_blocks_past_the_end() -> None:
    kv = make_kv(num_blocks=6, block_size=4)
    kv.allocate("a", 17)
    kv.rewind("a", 9)
    assert kv.block_ids("a") == (0, 1, 2)
    assert free_block_ids(kv.pool) == (5, 4, 3)
    kv.rewind("a", 8)
    assert kv.block_ids("a") == (0, 1)
    assert kv.block_tables[0].tolist() == [0, 1, 0, 0, 0, 0]
    kv.check_integrity()
    kv.rewind("a", 0)
    assert kv.block_ids("a") == ()
    assert kv.row("a") == 0
    kv.check_integrity()
    assert kv.allocate("a", 1)


def test_rewind_leaves_the_blocks_of_a_fork_alone() -> None:
    kv = make_kv(block_size=4)
    kv.allocate("parent", 8)
    kv.fork("parent", "child")
    kv.rewind("child", 3)
    assert kv.block_ids("parent") == (0, 1)
    assert ref_counts(kv)[:2] == [2, 1]


def test_rewind_beyond_the_end_is_refused_with_both_numbers() -> None:
    kv = make_kv(block_size=4)
    kv.allocate("a", 5)
    with pytest.raises(RewindError, match="6 tokens: the sequence holds 5") as refusal:
        kv.rewind("a", 6)
    assert refusal.value.fault is RewindFault.POSITION_BEYOND_END
    assert kv.block_ids("a") == (0, 1)
    kv.rewind("a", 5)


def test_a_child_that_holds_kv_cannot_be_forked_onto() -> None:
    kv = make_kv()
    kv.allocate("a", 1)
    kv.allocate("b", 1)
    with pytest.raises(AssertionError, match="b already holds KV"):
        kv.fork("a", "b")


def lose_a_reference(kv: PagedKvManager) -> None:
    kv.pool.share([0])


def lose_a_row(kv: PagedKvManager) -> None:
    kv._free_rows.pop()


def hold_too_many_blocks(kv: PagedKvManager) -> None:
    kv._sequences["a"].num_tokens = 1


def publish_a_wrong_table(kv: PagedKvManager) -> None:
    kv.block_tables[3, 3] = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_reference, "block 0: 2 references, 1 tables"),
        (lose_a_row, "rows are lost"),
        (hold_too_many_blocks, "row 0: length"),
        (publish_a_wrong_table, "the table matrix differs"),
    ],
)
def test_integrity_check_sees_damage(damage: Callable[[PagedKvManager], None], message: str) -> None:
    kv = make_kv(block_size=4)
    kv.allocate("a", 8)
    kv.check_integrity()
    damage(kv)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()
