import pytest

from engine.plan.kv.block_pool import BlockPool
from tests.support.factories import free_block_ids


def test_blocks_are_taken_in_order_and_reused_least_recently_released_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.release([1])
    pool.release([2, 0])
    assert free_block_ids(pool) == (3, 1, 2, 0)
    assert pool.take(2) == [3, 1]
    assert pool.num_free == 2
    pool.check_integrity()


def test_taking_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    assert pool.take(3) is None
    assert free_block_ids(pool) == (1, 2)
    assert pool.take(0) == []
    assert pool.take(2) == [1, 2]
    assert pool.num_free == 0


def test_a_shared_block_is_free_only_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.share([0, 1])
    pool.share([1])
    assert [pool.ref_count(0), pool.ref_count(1)] == [2, 3]
    pool.release([1, 0, 0])
    assert free_block_ids(pool) == (0,)
    assert pool.ref_count(1) == 2
    pool.check_integrity()


def test_misuse_is_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.share([0])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])


def test_integrity_check_sees_a_leaked_block() -> None:
    pool = BlockPool(2)
    pool._free.popitem()
    with pytest.raises(AssertionError, match="free list"):
        pool.check_integrity()
