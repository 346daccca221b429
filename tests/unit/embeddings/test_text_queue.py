"""TextQueue: whose texts are next."""

from __future__ import annotations

from engine.compute.embedding.records import EncodedText
from engine.embeddings.text_queue import TextJob, TextQueue


def job(tenant: str | None, *lengths: int) -> TextJob:
    return TextJob(tenant, [EncodedText([1] * length) for length in lengths])


def taken(queue: TextQueue, max_tokens: int, *jobs: TextJob) -> list[tuple[int, int]]:
    return [(jobs.index(each.job), each.index) for each in queue.take(max_tokens)]


def test_a_batch_is_as_large_as_it_may_be_and_takes_a_long_text_alone() -> None:
    queue, only = TextQueue(), job(None, 40, 40, 40, 500, 10)
    queue.add(only)
    assert queue.num_tokens == 630
    assert taken(queue, 100, only) == [(0, 0), (0, 1)]
    assert taken(queue, 100, only) == [(0, 2)]
    assert taken(queue, 100, only) == [(0, 3)]
    assert taken(queue, 100, only) == [(0, 4)]
    assert (taken(queue, 100), queue.num_tokens, len(queue)) == ([], 0, 0)


def test_requests_of_one_tenant_take_turns() -> None:
    queue, large, small = TextQueue(), job("a", *[10] * 20), job("a", 10, 10)
    queue.add(large)
    queue.add(small)
    assert taken(queue, 40, large, small) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_tenants_get_as_many_tokens_as_each_other_not_as_many_texts() -> None:
    queue, long, short = TextQueue(), job("a", *[50] * 20), job("b", *[10] * 100)
    queue.add(long)
    queue.add(short)
    found = taken(queue, 1000, long, short)
    tokens = [sum((50, 10)[owner] for owner, _ in found if owner == each) for each in (0, 1)]
    assert sum(tokens) == 1000 and abs(tokens[0] - tokens[1]) <= 50


def test_who_was_away_does_not_get_what_others_had_meanwhile() -> None:
    queue, first, late = TextQueue(), job("a", *[10] * 200), job("b", *[10] * 50)
    queue.add(first)
    queue.take(1000)
    queue.add(late)
    found = taken(queue, 200, first, late)
    assert sum(owner == 0 for owner, _ in found) == sum(owner == 1 for owner, _ in found) == 10


def test_what_is_dropped_is_not_taken() -> None:
    queue, gone, kept = TextQueue(), job("a", 10, 10, 10), job("b", 10)
    queue.add(gone)
    queue.add(kept)
    queue.take(10)
    queue.drop(gone)
    queue.drop(gone)
    assert queue.num_tokens == 10
    assert taken(queue, 100, kept) == [(0, 0)]


def test_whoever_asks_what_waits_reads_no_text_for_it() -> None:
    class Text(EncodedText):
        def __len__(self) -> int:
            asked.append(self)
            return super().__len__()

    asked: list[EncodedText] = []
    queue, only = TextQueue(), TextJob(None, [Text([1, 1])] * 1000)
    queue.add(only)
    queue.take(20)
    asked.clear()
    assert (only.num_tokens, queue.num_tokens) == (1980, 1980)
    assert not asked
    queue.drop(only)
    assert (queue.num_tokens, len(queue), asked) == (0, 0, [])
