"""The work that a step's attention is cut into: everything once, nothing twice, and in even pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention.layer_kv import Reach
from engine.compute.cuda.triton_work import (
    HeadShape,
    StepLengths,
    Work,
    Workforce,
    cut_work,
    max_items,
    max_partials,
)
from tests.support.attention_noise import Chunk
from tests.support.examples import share_of

GROUPED = HeadShape(8, 2, None)
H200 = 132
WANTED = Workforce.of(H200, 2).kinds[0].programs  # of each processor, for decodes


def lengths_of(chunks: list[Chunk]) -> StepLengths:
    counts = np.array([chunk.count for chunk in chunks])
    return StepLengths(
        counts,
        np.array([chunk.context for chunk in chunks]) + counts,
        np.array([bool(chunk.parents) for chunk in chunks]),
    )


def seen_by(chunks: list[Chunk], work: Work, workforce: Workforce) -> dict[tuple[int, int], list[range]]:
    """The runs of keys of each (sequence, query), in the order in which they are merged."""
    runs: dict[tuple[int, int], list[tuple[int, range]]] = {}
    for kind, items in zip(workforce.kinds, work.items, strict=True):
        for sequence, first, start, stop, partial in items.tolist():
            for query in range(first, min(first + kind.queries, chunks[sequence].count)):
                row = partial + query - first if partial >= 0 else -1
                runs.setdefault((sequence, query), []).append((row, range(start, stop)))
    assert_merges(chunks, work, {key: [row for row, _ in found] for key, found in runs.items()})
    return {key: [run for _, run in sorted(found, key=lambda one: one[0])] for key, found in runs.items()}


def assert_merges(chunks: list[Chunk], work: Work, rows: dict[tuple[int, int], list[int]]) -> None:
    """A query of one run is finished by it; those of several have one merge that finds exactly theirs."""
    starts = np.cumsum([0, *(chunk.count for chunk in chunks)])
    merges = {
        token: range(first, first + step * runs, step) for token, first, step, runs in work.merges.tolist()
    }
    assert len(merges) == len(work.merges)
    split = {
        int(starts[sequence]) + query: found for (sequence, query), found in rows.items() if found != [-1]
    }
    assert split.keys() == merges.keys()
    for token, found in split.items():
        assert sorted(found) == list(merges[token])
    every = [row for found in split.values() for row in found]
    assert sorted(every) == list(range(work.num_partials))


chunks_strategy = st.lists(
    st.builds(
        lambda context, count, is_tree: Chunk(context, count, [-1] * (count - 1) if is_tree else ()),
        st.one_of(st.integers(0, 70), st.integers(0, 9000)),
        st.one_of(st.just(1), st.integers(2, 60), st.integers(1, 160)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
reaches = st.one_of(st.none(), st.builds(Reach, st.integers(1, 200) | st.integers(1, 9000), st.booleans()))


@settings(max_examples=share_of(30), deadline=None)
@given(chunks_strategy, reaches, st.sampled_from([2, 4]), st.sampled_from([1, 16, H200]))
def test_every_query_meets_all_that_it_sees_once(
    chunks: list[Chunk], reach: Reach | None, itemsize: int, processors: int
) -> None:
    workforce = Workforce.of(processors, itemsize)
    work = cut_work(lengths_of(chunks), HeadShape(8, 2, reach), workforce)
    runs = seen_by(chunks, work, workforce)
    assert runs.keys() == {(row, query) for row, chunk in enumerate(chunks) for query in range(chunk.count)}
    for (sequence, query), found in runs.items():
        chunk = chunks[sequence]
        newest = chunk.context + query
        depth = chunk.context if chunk.parents else newest
        oldest = 0 if reach is None else max(0, reach.first(depth))
        assert all(one.stop == other.start for one, other in pairwise(found))
        assert found[0].start <= oldest and found[-1].stop > newest
        assert found[-1].stop <= chunk.context + chunk.count
        kind = next(kind for kind in workforce.kinds if chunk.count <= kind.max_queries)
        assert all(run.start % kind.keys == 0 for run in found)


@settings(max_examples=share_of(30), deadline=None)
@given(chunks_strategy, reaches, st.sampled_from([HeadShape(8, 2, None), HeadShape(71, 1, None)]))
def test_the_room_of_a_bucket_is_enough(chunks: list[Chunk], reach: Reach | None, heads: HeadShape) -> None:
    shape = heads._replace(reach=reach)
    workforce = Workforce.of(H200, 2)
    num_tokens = sum(chunk.count for chunk in chunks)
    work = cut_work(lengths_of(chunks), shape, workforce)
    room = [max_items(kind, len(chunks), num_tokens, shape, H200) for kind in workforce.kinds]
    assert all(len(items) <= most for items, most in zip(work.items, room, strict=True))
    assert work.num_partials <= max_partials(workforce, room, num_tokens, shape)


# As tokens mostly come; windows begin at all places of a run, and reach over many of them.
sequences = st.tuples(st.integers(0, 130_000), st.sampled_from([1, 1, 1, 4, 16, 30, 100, 128, 700]))
windows = st.sampled_from([None, 1, 128, 512, 4096, 60_000]).map(lambda size: Reach.of(size, None))


@settings(max_examples=share_of(100), deadline=None)
@given(
    st.lists(sequences, max_size=40),
    st.sampled_from([HeadShape(32, 8, None), HeadShape(20, 1, None), HeadShape(128, 1, None)]),
    windows,
    st.sampled_from([1, 7, H200]),
)
def test_long_contexts_have_room_for_their_partial_rows(
    steps: list[tuple[int, int]], heads: HeadShape, reach: Reach | None, processors: int
) -> None:
    workforce, shape = Workforce.of(processors, 2), heads._replace(reach=reach)
    work = cut_work(lengths_of([Chunk(*step) for step in steps]), shape, workforce)
    num_tokens = sum(count for _, count in steps)
    assert work.num_partials <= max_partials(workforce, [len(rows) for rows in work.items], num_tokens, shape)


@pytest.mark.parametrize("count", [1, 16, 128])
def test_tiles_that_lie_across_a_border_need_two_rows_for_each_token(count: int) -> None:
    """Which is what the bound behind a window has of them, beside the runs that long ones would fill."""
    border = 1 << 16  # of runs of any length here
    chunks = [Chunk(border - count // 2, count)] * 64
    work = cut_work(lengths_of(chunks), HeadShape(32, 8, Reach.of(512, None)), Workforce.of(H200, 2))
    assert work.num_partials == 2 * 64 * count


def partials_of(reach: Reach | None) -> int:
    """Those that a recorded step of 2,048 tokens and 256 sequences keeps room for, of Llama 8B's heads."""
    workforce, shape = Workforce.of(H200, 2), HeadShape(32, 8, reach)
    most = [max_items(kind, 256, 2048, shape, H200) for kind in workforce.kinds]
    return max_partials(workforce, most, 2048, shape)


def test_a_recorded_step_keeps_few_partial_rows() -> None:
    """Of 32 heads of 128 those of all items were 1.4 GB, of 20 latent ones 3.4."""
    assert partials_of(None) < 3000
    assert partials_of(Reach.of(512, None)) == 2 * 2048 + 33 * (1 + 16) + 5 * 128


def test_a_recorded_step_has_items_for_one_tile_of_each_decode() -> None:
    """With one for every token there were 4,129 programs for each K/V head."""
    workforce, shape = Workforce.of(H200, 2), HeadShape(32, 8, None)
    most = [max_items(kind, 256, 2048, shape, H200) for kind in workforce.kinds]
    assert most == [2 * 256 + 33, 2 * (256 + 128) + 33, 2 * (256 + 16) + 5]


def programs(chunks: list[Chunk], shape: HeadShape) -> np.ndarray:
    """Keys of every program of the step."""
    workforce = Workforce.of(H200, 2)
    work = cut_work(lengths_of(chunks), shape, workforce)
    return np.concatenate(
        [
            np.repeat(items[:, 3] - items[:, 2], kind.programs_of_an_item(shape))
            for kind, items in zip(workforce.kinds, work.items, strict=True)
        ]
    )


def test_one_long_decode_is_read_by_the_whole_device() -> None:
    keys = programs([Chunk(32_000)], HeadShape(32, 8, None))
    assert len(keys) >= WANTED * H200 / 2 and keys.max() <= 1024


def test_many_decodes_are_not_split() -> None:
    chunks = [Chunk(1000)] * 256
    assert len(programs(chunks, HeadShape(32, 8, None))) == 256 * 8
    assert not len(cut_work(lengths_of(chunks), HeadShape(32, 8, None), Workforce.of(H200, 2)).merges)


def test_a_long_one_among_many_holds_nobody_up() -> None:
    """No program has more than a few times what each would have if all were even."""
    keys = programs([*[Chunk(900)] * 63, Chunk(130_000)], HeadShape(32, 8, None))
    assert keys.max() <= 2 * keys.sum() / (WANTED * H200)


def test_a_whole_prompt_is_not_split_and_its_longest_tiles_come_first() -> None:
    shape = HeadShape(32, 8, None)
    work = cut_work(lengths_of([Chunk(0, 4096)]), shape, Workforce.of(H200, 2))
    prefill = work.items[2]
    assert len(prefill) == 32 and work.num_partials == 0
    assert prefill[0].tolist() == [0, 3968, 0, 4096, -1]
    assert (np.diff(prefill[:, 3] - prefill[:, 2]) <= 0).all()


@pytest.mark.parametrize("window", [None, 512])
def test_a_chunk_after_a_long_context_is_split(window: int | None) -> None:
    work = cut_work(
        lengths_of([Chunk(16_000, 100)]), HeadShape(32, 8, Reach.of(window, None)), Workforce.of(H200, 2)
    )
    assert (work.num_partials > 0) == (window is None)
