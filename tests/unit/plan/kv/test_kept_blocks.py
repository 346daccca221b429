"""Who gives the next block: the owner who keeps the most, of those who have used theirs lately."""

from __future__ import annotations

import random
from collections import Counter

from engine.plan.kv.block_pool import HASH_BYTES, BlockPool, KeptBlocks
from engine.plan.kv.prefix_cache import PrefixCache, extend_block_hashes, owned_salt

A, B, C = b"a", b"b", b"c"


def filled(num_blocks: int, **counts: int) -> KeptBlocks:
    kept, block_ids = KeptBlocks(num_blocks), iter(range(num_blocks))
    for owner, count in counts.items():
        for _ in range(count):
            kept.add(next(block_ids), owner.encode())
    return kept


def test_of_one_owner_the_oldest_goes_first() -> None:
    kept = filled(4, a=4)
    kept.remove(0, A)
    kept.add(0, A)
    assert [kept.take() for _ in range(4)] == [1, 2, 3, 0]
    assert len(kept) == 0


def test_who_has_the_most_gives_until_all_have_as_many() -> None:
    kept = filled(20, a=3, b=10, c=6)
    taken = [kept.take() for _ in range(11)]
    assert taken[:4] == [3, 4, 5, 6], "the oldest of b's"
    assert sorted(Counter("a" if i < 3 else "b" if i < 13 else "c" for i in kept).values()) == [2, 3, 3]


def test_who_has_freed_none_for_long_gives_before_all_others() -> None:
    kept = filled(4, a=1, b=3)
    for number in range(16 * 4):
        taken = kept.take()
        assert taken != 0, number
        kept.add(taken, B)
    assert kept.take() == 0


def test_an_owner_who_comes_back_has_a_claim_again() -> None:
    kept = filled(4, a=1, b=3)
    for number in range(200):
        if number % 60 == 59:
            kept.remove(0, A)  # found by a request of a's, which frees it again
            kept.add(0, A)
        taken = kept.take()
        assert taken != 0, number
        kept.add(taken, B)


def test_any_order_of_calls_keeps_what_was_added() -> None:
    rng, kept, model = random.Random(1), KeptBlocks(50), dict[int, bytes]()
    for _ in range(5000):
        free = [block_id for block_id in range(50) if block_id not in model]
        if free and rng.random() < 0.55:
            block_id, owner = rng.choice(free), rng.choice((A, B, C))
            kept.add(block_id, owner)
            model[block_id] = owner
        elif model and rng.random() < 0.5:
            block_id = rng.choice(list(model))
            kept.remove(block_id, model.pop(block_id))
        elif model:
            most = max(Counter(model.values()).values())
            block_id = kept.take()
            assert Counter(model.values())[model.pop(block_id)] == most
        assert set(kept) == set(model) and len(kept) == len(model)


def test_the_pool_takes_blocks_that_are_not_kept_first() -> None:
    pool = BlockPool(4)
    block_ids = pool.take(3)
    assert block_ids is not None
    pool.keep(block_ids[0], A + bytes(HASH_BYTES))
    pool.keep(block_ids[1], B + bytes(HASH_BYTES))
    pool.release(block_ids)
    assert pool.take(4) == [3, 2, 0, 1]


def test_a_tenant_does_not_push_out_what_another_has_cached() -> None:
    """B computes ten times as many prompts as fit; A's one prompt is found after it."""
    pool = BlockPool(12)
    cache = PrefixCache(pool)

    def compute(first_token: int, owner: str) -> int:
        """How many of the prompt's four blocks were found."""
        hashes: list[bytes] = []
        extend_block_hashes(hashes, range(first_token, first_token + 16), 4, 4, owned_salt(owner, None))
        found = cache.find(hashes, 4)
        pool.share(found)
        taken = pool.take(4 - len(found))
        assert taken is not None
        for block_id, block_hash in zip((*found, *taken), hashes, strict=True):
            cache.publish(block_id, block_hash)
        pool.release((*found, *taken))
        cache.check_integrity()
        return len(found)

    assert compute(0, "a") == 0
    for number in range(30):
        assert compute(1000 * number, "b") == 0
    assert compute(0, "a") == 4
