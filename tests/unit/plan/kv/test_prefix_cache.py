import hashlib

import pytest

from engine.plan.kv.block_pool import BlockPool
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.kv.prefix_cache import PrefixCache, extend_block_hashes, owned_salt
from tests.support.factories import free_block_ids, make_kv

HASHES = [bytes([i]) * 32 for i in range(8)]


def make_cache(num_blocks: int = 4) -> tuple[BlockPool, PrefixCache]:
    """A cache over blocks that are all taken."""
    pool = BlockPool(num_blocks)
    pool.take(num_blocks)
    return pool, PrefixCache(pool)


def hashes_of(tokens: list[int], salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, 2, len(tokens) // 2, salt)
    return hashes


def test_a_block_is_named_by_its_parent_and_its_tokens() -> None:
    first = hashlib.sha256(hashlib.sha256(b"").digest() + b"".join(n.to_bytes(8, "little") for n in (1, 2)))
    assert hashes_of([1, 2, 3]) == [first.digest()]
    assert hashes_of([1, 2, 3, 4])[:1] == [first.digest()]
    assert hashes_of([3, 4])[0] != hashes_of([1, 2, 3, 4])[1]


def test_hashes_are_extended_not_computed_again() -> None:
    hashes = hashes_of([1, 2])
    extend_block_hashes(hashes, [-1, -1, 3, 4, 5, 6], 2, 3, None)
    assert hashes == hashes_of([1, 2, 3, 4, 5, 6])
    extend_block_hashes(hashes, [], 2, 2, None)
    assert len(hashes) == 3


def test_a_salt_separates() -> None:
    names = {hashes_of([1, 2], salt)[0] for salt in (None, "", "a", "b")}
    assert len(names) == 4


def test_an_owner_separates_whatever_the_salts() -> None:
    owned = [owned_salt(owner, salt) for owner in ("a", "b", "+a") for salt in (None, "a", "b", "a\0b")]
    salts = [None, "a", "b", "+a", *owned]
    assert len({hashes_of([1, 2], salt)[0] for salt in salts}) == len(salts)
    assert owned_salt(None, "a") == "a" and owned_salt(None, None) is None


def test_a_reset_withdraws_what_is_the_owners() -> None:
    pool, cache = make_cache(6)
    salts = (
        None,
        "a",
        owned_salt("a", None),
        owned_salt("a", "x"),
        owned_salt("b", None),
        owned_salt("ab", None),
    )
    names = [hashes_of([1, 2, 3, 4], salt)[1] for salt in salts]
    for block_id, name in enumerate(names):
        cache.publish(block_id, name)
    pool.release(range(6))
    assert cache.reset("a") == 2
    assert [bool(cache.find([name], 1)) for name in names] == [True, True, False, False, True, True]
    assert cache.reset("nobody") == 0
    assert cache.reset() == 4
    cache.check_integrity()


def test_the_longest_published_run_is_found() -> None:
    _, cache = make_cache()
    for block_id, name in ((2, 0), (0, 1), (1, 3)):
        cache.publish(block_id, HASHES[name])
    assert cache.find(HASHES, 8) == [2, 0]
    assert cache.find(HASHES, 1) == [2]
    assert cache.find(HASHES[4:], 2) == []
    assert 2 in cache
    assert 3 not in cache
    cache.check_integrity()


def test_the_first_block_published_under_a_hash_stays() -> None:
    _, cache = make_cache()
    cache.publish(2, HASHES[0])
    cache.publish(3, HASHES[0])
    assert cache.find(HASHES, 1) == [2]
    cache.withdraw(3)
    assert cache.find(HASHES, 1) == [2]
    cache.withdraw(2)
    assert cache.find(HASHES, 1) == []
    cache.check_integrity()


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool, cache = make_cache()
    cache.publish(1, HASHES[0])
    pool.release([1, 3])
    assert free_block_ids(pool) == (3, 1)
    assert pool.take(1) == [3]
    assert cache.find(HASHES, 1) == [1]
    taken = pool.take(1)
    assert taken == [1]
    assert cache.find(HASHES, 1) == []
    cache.check_integrity()


def test_reset_leaves_what_is_in_use() -> None:
    pool, cache = make_cache()
    for block_id in (0, 1, 2):
        cache.publish(block_id, HASHES[block_id])
    pool.release([2, 1])
    assert cache.reset() == 2
    assert cache.find(HASHES, 3) == [0]
    assert (free_block_ids(pool), pool.num_free_kept) == ((2, 1), 0)
    assert cache.reset() == 0


def test_each_hash_is_claimed_once() -> None:
    _, cache = make_cache()
    cache.claim("a", HASHES[:2])
    cache.claim("b", HASHES[1:3])
    assert [cache.claimant(name) for name in HASHES[:4]] == ["a", "a", "b", None]
    cache.check_integrity()
    cache.unclaim("a")
    cache.unclaim("a")
    assert [cache.claimant(name) for name in HASHES[:3]] == [None, None, "b"]
    cache.check_integrity()


def publish(kv: PagedKvManager, name: str, num_blocks: int) -> None:
    kv.publish(name, HASHES, num_blocks)


def test_a_sequence_starts_on_published_blocks() -> None:
    kv = make_kv(num_blocks=6)
    kv.allocate("a", 9)
    publish(kv, "a", 2)
    assert kv.num_published("a") == 2
    assert kv.start("b", 10, kv.prefixes.find(HASHES, 2))
    assert kv.block_ids("b") == (0, 1, 3)
    assert [kv.pool.ref_count(block) for block in range(4)] == [2, 2, 1, 1]
    kv.free("a")
    assert (kv.pool.num_free, kv.pool.num_free_kept) == (3, 0)
    kv.free("b")
    assert free_block_ids(kv.pool) == (4, 5, 2, 3, 1, 0), "kept ones are taken last"
    assert (kv.pool.num_free, kv.pool.num_free_kept, kv.num_used_blocks) == (6, 2, 0)
    assert kv.start("c", 8, kv.prefixes.find(HASHES, 2))
    assert kv.block_ids("c") == (0, 1)
    kv.check_integrity()


def test_found_blocks_are_not_counted_as_free_for_the_rest() -> None:
    kv = make_kv(num_blocks=3)
    kv.allocate("a", 8)
    publish(kv, "a", 2)
    kv.free("a")
    order = free_block_ids(kv.pool)
    assert not kv.start("b", 16, kv.prefixes.find(HASHES, 2))
    assert free_block_ids(kv.pool) == order
    assert kv.start("b", 12, kv.prefixes.find(HASHES, 2))
    assert kv.block_ids("b") == (0, 1, 2)


def test_the_least_recently_used_contents_are_lost_first() -> None:
    kv = make_kv(num_blocks=4)
    kv.allocate("a", 8)
    kv.publish("a", HASHES, 2)
    kv.allocate("b", 8)
    kv.publish("b", HASHES[4:], 2)
    kv.free("b")
    kv.free("a")
    kv.allocate("c", 9)
    assert kv.block_ids("c") == (3, 2, 1)
    assert kv.prefixes.find(HASHES, 2) == [0]
    assert kv.prefixes.find(HASHES[4:], 2) == []
    kv.check_integrity()


def test_writing_over_a_published_block_withdraws_it() -> None:
    kv = make_kv()
    kv.allocate("a", 12)
    publish(kv, "a", 3)
    kv.rewind("a", 6)
    assert kv.num_published("a") == 2
    assert kv.prefixes.find(HASHES, 3) == [0, 1, 2], "what it gave back is still whole"
    assert kv.copy_on_write("a", 6) == ()
    assert kv.prefixes.find(HASHES, 3) == [0]
    assert kv.num_published("a") == 1
    kv.check_integrity()


def test_a_shared_published_block_is_copied_and_stays_published() -> None:
    kv = make_kv()
    kv.allocate("a", 8)
    publish(kv, "a", 2)
    kv.fork("a", "b")
    assert kv.num_published("b") == 2
    assert kv.copy_on_write("b", 7) == ((1, 2),)
    assert kv.prefixes.find(HASHES, 2) == [0, 1]
    assert kv.num_published("b") == 1


def test_a_failed_sequence_takes_back_all_it_held() -> None:
    kv = make_kv()
    kv.allocate("a", 8)
    publish(kv, "a", 2)
    kv.start("b", 8, kv.prefixes.find(HASHES, 2))
    kv.mark_kv_bad("b")
    assert kv.prefixes.find(HASHES, 2) == []
    assert kv.num_published("b") == 0
    kv.free("a")
    kv.free("b")
    assert kv.pool.num_free_kept == 0


def test_only_contents_that_exist_are_kept() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.keep(0, HASHES[0])


def test_a_sequence_starts_once() -> None:
    kv = make_kv()
    kv.allocate("a", 1)
    with pytest.raises(AssertionError, match="a already holds KV"):
        kv.start("a", 1)
