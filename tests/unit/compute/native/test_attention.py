"""The kernel that attends from every row: against the reference, and bit for bit against itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention import CpuAttention, LayerCall, PagedRows, ReferenceAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv, Reach
from engine.compute.native import kernels as kernels_module
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.scratch import record_numbers
from engine.compute.runner.dummy_steps import Part, pack_step
from tests.support.attention_noise import Chunk, Noise, attend, random_tree, tree
from tests.support.examples import share_of
from tests.support.native import compiled_kernels

CPU = torch.device("cpu")
PAGES = torch.empty(1, 1, 16, 32, dtype=torch.bfloat16)
BLOCK, CHUNK = 64, 512  # positions that the kernel takes at once, and that it sums by themselves
EDGES = (0, 1, 15, 16, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels(formats=True)


# --- numbers ---


def check(kernels: NativeKernels, noise: Noise) -> None:
    """As the reference in float32, up to rounding; what a token may not see is NaN. So over K/V of 8 bits."""
    for kept in (None, torch.int8):
        ours = attend(noise, CpuAttention(kernels), CPU, torch.bfloat16, poisoned=True, kept=kept)
        expected = attend(noise, ReferenceAttention(), CPU, torch.float32, kept=kept)
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=6e-3)


def noise(chunks: Sequence[Chunk], layer: LayerKv | None = None, **options: Any) -> Noise:
    return Noise(chunks, layer or LayerKv(2, 32, 32), **{"dtype": torch.bfloat16, **options})


@pytest.mark.parametrize("window", [None, 1, 16, 100, CHUNK])
def test_lengths_at_the_edges(kernels: NativeKernels, window: int | None) -> None:
    layer = LayerKv(2, 32, 32, window)
    check(kernels, noise([Chunk(context) for context in EDGES], layer))
    check(kernels, noise([Chunk(context, 3) for context in EDGES], layer))
    check(kernels, noise([Chunk(0, count) for count in EDGES[1:8]], layer))
    check(kernels, noise([Chunk(100, 70), Chunk(500, 40)], layer))


@pytest.mark.by_default
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("heads_of_each", [1, 2, 3, 4, 5, 6, 7, 8])
def test_shapes_of_heads(kernels: NativeKernels, dim: int, heads_of_each: int) -> None:
    chunks = [Chunk(5), Chunk(70, 2), Chunk(3, 37)]
    check(kernels, noise(chunks, LayerKv(3, dim, dim), heads_of_each=heads_of_each, block_size=7))


def test_a_group_larger_than_a_tile(kernels: NativeKernels) -> None:
    check(kernels, noise([Chunk(40, 5), Chunk(600)], LayerKv(1, 32, 32), heads_of_each=64, block_size=1))
    check(kernels, noise([Chunk(40, 5)], LayerKv(1, 32, 32), heads_of_each=100))


@pytest.mark.parametrize("chunk", [1, 16, 100, CHUNK])
def test_chunks_and_sinks(kernels: NativeKernels, chunk: int) -> None:
    layer = LayerKv(2, 32, 32, chunk=chunk)
    check(kernels, noise([Chunk(context) for context in EDGES], layer))
    check(
        kernels, noise([Chunk(100, 70), Chunk(500, 40), tree(98, [-1, 0, 1, -1, 3])], layer, has_sinks=True)
    )


@pytest.mark.parametrize("softcap", [0.5, 4.0, 50.0])
def test_soft_caps(kernels: NativeKernels, softcap: float) -> None:
    check(kernels, noise([Chunk(130), Chunk(9, 50)], softcap=softcap))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 40])
def test_trees(kernels: NativeKernels, window: int | None) -> None:
    rng = np.random.default_rng(0)
    contexts = [(0, 1), (1, 20), (62, 40), (600, 80), (30, 150)]  # beyond a block, a tile and a mask's bits
    chunks = [
        random_tree(rng, context, drafts, deepening)
        for context, drafts in contexts
        for deepening in (0.0, 0.6, 0.95)
    ]
    check(kernels, noise([Chunk(40), *chunks, Chunk(9, 30)], LayerKv(2, 32, 32, window)))


@st.composite
def any_chunk(draw: st.DrawFn) -> Chunk:
    context = draw(st.one_of(st.sampled_from(EDGES), st.integers(0, 300)))
    if draw(st.booleans()):
        return Chunk(context, draw(st.integers(1, 80)))
    return tree(context, [draw(st.integers(-1, at - 1)) for at in range(draw(st.integers(0, 20)))])


@settings(max_examples=share_of(40), deadline=None)
@given(
    chunks=st.lists(any_chunk(), min_size=1, max_size=5),
    dim=st.sampled_from([32, 64, 96]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    reach=st.one_of(st.none(), st.builds(Reach, st.integers(1, 200), st.booleans())),
    softcap=st.one_of(st.none(), st.just(4.0)),
    block_size=st.sampled_from([1, 3, 16, 64, 100]),
    has_sinks=st.booleans(),
)
def test_anything(
    chunks: list[Chunk],
    dim: int,
    heads: tuple[int, int],
    reach: Reach | None,
    softcap: float | None,
    block_size: int,
    has_sinks: bool,
) -> None:
    window, chunk = (
        (None, None) if reach is None else (None, reach.size) if reach.in_chunks else (reach.size, None)
    )
    layer = LayerKv(heads[0], dim, dim, window, chunk)
    options = {
        "heads_of_each": heads[1],
        "block_size": block_size,
        "softcap": softcap,
        "has_sinks": has_sinks,
    }
    check(compiled_kernels(formats=True), noise(chunks, layer, **options))


# --- bits ---

LENGTHS = (1100, 700, 90, 33)
BLOCK_SIZE = 16


class Stored:
    """A few sequences whose tokens are all in the pages, and a query for each token."""

    def __init__(self, kernels: NativeKernels, call: LayerCall, kept: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        free = np.random.default_rng(0).permutation(sum(needed)).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in needed]
        self.kv = KvTensors((LayerKv(3, 64, 64),), sum(needed), BLOCK_SIZE, torch.bfloat16, CPU, kept)
        self.numbers = torch.randn(2, sum(needed) * BLOCK_SIZE, 3, 64, generator=generator).bfloat16()
        self.write()
        self.queries = [torch.randn(length, 9, 64, generator=generator).bfloat16() for length in LENGTHS]
        self._kernels, self._call = kernels, call

    def write(self) -> None:
        """Put `numbers`, keys and values [2, slots, kv heads, dim], into the pages."""
        slots = torch.arange(self.numbers.shape[1])
        self.kv.write(0, self.kv.rows_of(slots, 3), *self.numbers)

    def attend(self, *runs: tuple[int, int, int]) -> list[torch.Tensor]:
        """Of each (sequence, first token, stop) in one step what its tokens attend to."""
        parts = [Part([7] * stop, first, stop, self.blocks[of]) for of, first, stop in runs]
        query = torch.cat([self.queries[of][first:stop] for of, first, stop in runs])
        step = CpuAttention(self._kernels).plan(pack_step(parts, BLOCK_SIZE), self.kv)
        counts = [stop - first for _, first, stop in runs]
        return list(torch.split(step.attend(query, self._call), counts))


@pytest.mark.by_default
@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize(
    "call",
    [
        LayerCall(0, 0.3),
        LayerCall(0, 0.3, 300),
        LayerCall(0, 0.3, None, 4.0),
        LayerCall(0, 0.3, chunk=300, sinks=torch.linspace(-3, 3, 9)),
    ],
)
def test_the_same_bits_in_any_company(
    kernels: NativeKernels, call: LayerCall, kept: torch.dtype | None
) -> None:
    """Whole prompts, chunks cut anywhere, single tokens; beside others or not; on any number of threads."""
    stored = Stored(kernels, call, kept)
    whole = [stored.attend((of, 0, length))[0] for of, length in enumerate(LENGTHS)]
    cuts = [0, 1, 17, 64, 100, 511, 530, 1024, 1100]
    for number in (1, 2, 3, 5):
        kernels.team.resize(number)
        for first, stop in pairwise(cuts):
            (found,) = stored.attend((0, first, stop))
            assert torch.equal(found, whole[0][first:stop])
        for token in (0, 63, 64, 511, 512, 1099):
            (found,) = stored.attend((0, token, token + 1))
            assert torch.equal(found[0], whole[0][token])
        runs = [(1, 600, 601), (2, 80, 81), (3, 20, 33), (2, 3, 80), (0, 900, 1100)]
        for (of, first, stop), found in zip(runs, stored.attend(*runs), strict=True):
            assert torch.equal(found, whole[of][first:stop])
    kernels.team.resize(1)


@pytest.mark.parametrize("num_records", [0, 1, 13, 14, 40, 10**4])
def test_the_same_bits_however_few_records_of_chunks_fit(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, num_records: int
) -> None:
    """Chunks of three sequences in rounds, down to one a round; and tiles as a whole where none fit."""
    stored, runs = Stored(kernels, LayerCall(0, 0.3)), [(0, 1090, 1097), (1, 600, 601), (2, 80, 81)]
    kernels.team.resize(1)
    expected = stored.attend(*runs)
    kernels.team.resize(3)
    tile = 7 * 3 * (64 + 32)
    monkeypatch.setattr(kernels_module, "record_numbers", lambda dim, threads: num_records * tile)
    for _ in range(10):
        assert all(map(torch.equal, stored.attend(*runs), expected))
    kernels.team.resize(1)


def test_the_room_for_records_does_not_grow_with_the_context(kernels: NativeKernels) -> None:
    kernels.team.resize(2)
    check(kernels, noise([Chunk(40_000)], LayerKv(1, 32, 32), heads_of_each=2))
    fitting = record_numbers(32, 2)
    record = kernels.attention_record(rows_of(1), PAGES, 2)
    assert (record.room, kernels._records.data_ptr()) == (fitting, record.records)
    kernels.team.resize(1)
    assert kernels.attention_record(rows_of(1), PAGES, 2).room == 0


def test_records_stay_while_a_call_has_them(kernels: NativeKernels) -> None:
    """A drafter on another thread may have larger heads than its target, and need more meanwhile."""
    kernels._records = torch.empty(0)
    kernels.team.resize(2)
    record = kernels.attention_record(rows_of(1), PAGES, 2)
    given = weakref.ref(kernels._records)
    larger = kernels.attention_record(rows_of(1), PAGES.view(1, 1, 8, 64), 2)
    kernels.team.resize(1)
    kept = given()
    assert larger.room > record.room
    assert kept is not None and kept.data_ptr() == record.records
    del record, kept
    assert given() is None, "nobody needs them any more"


def test_scratch_that_cannot_be_had_is_refused_by_name(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "record_numbers", lambda dim, threads: 2**60)
    with pytest.raises(NativeUnavailable, match="no 4611686018427387904 bytes for the scratch of attention"):
        kernels.attention_record(rows_of(1), PAGES, 2)


def rows_of(num_sequences: int) -> PagedRows:
    ones = torch.ones(num_sequences, dtype=torch.int32)
    return PagedRows(ones, ones, ones.view(-1, 1), None, None)


def test_queries_in_any_layout(kernels: NativeKernels) -> None:
    stored = Stored(kernels, LayerCall(0, 0.2))
    (expected,) = stored.attend((2, 0, 90))
    sideways = stored.queries[2].transpose(0, 1).contiguous().transpose(0, 1)  # as transformers hands it on
    assert not sideways.is_contiguous()
    stored.queries[2] = sideways
    assert torch.equal(stored.attend((2, 0, 90))[0], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("kept", [None, torch.int8])
def test_what_is_not_finite_is_not_hidden(
    kernels: NativeKernels, value: float, of_keys: bool, kept: torch.dtype | None
) -> None:
    """A row must show that its numbers are broken, and its neighbours must not."""
    stored = Stored(kernels, LayerCall(0, 0.2), kept)
    stored.queries = [query.abs() for query in stored.queries]
    stored.numbers[0 if of_keys else 1, stored.blocks[0][0] * BLOCK_SIZE + 3] = value
    stored.write()
    found = stored.attend((0, 1099, 1100), (1, 600, 601), (2, 60, 90))
    if not of_keys or value != -float("inf"):  # else its weight is nothing, as it should be
        assert not found[0].isfinite().any()
    assert all(part.isfinite().all() for part in found[1:])
    stored.queries[2][70, 4] = float("nan")
    (broken,) = stored.attend((2, 60, 90))
    assert broken[10, 4].isnan().all()
    broken[10, 4] = 0
    assert broken.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("reach", [None, Reach(20), Reach(20, in_chunks=True)])
@pytest.mark.parametrize("kept", [None, torch.int8])
def test_what_is_not_finite_shows_in_no_token_that_does_not_see_it(
    kernels: NativeKernels, value: float, reach: Reach | None, kept: torch.dtype | None
) -> None:
    """A draft, or what lies before a window: drafts that are refused change nothing before them."""
    window, chunk = (None, None) if reach is None else (None, 20) if reach.in_chunks else (20, None)
    stored, token = Stored(kernels, LayerCall(0, 0.2, window, chunk=chunk), kept), 1050
    runs = [(0, 1000, 1100), (0, 1048, 1053), (0, 1050, 1100)]
    expected = [stored.attend(run)[0] for run in runs]
    stored.numbers[1, stored.blocks[0][token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE] = value
    stored.write()
    for (_, first, stop), whole in zip(runs, expected, strict=True):
        (found,) = stored.attend((0, first, stop))
        for at, row, like in zip(range(first, stop), found, whole, strict=True):
            if token <= at and (reach is None or reach.first(at) <= token):
                assert not row.isfinite().any()
            else:
                assert torch.equal(row, like)


def test_nothing_to_attend_to_is_no_work(kernels: NativeKernels) -> None:
    none = torch.empty(0, dtype=torch.int32)
    pages = (torch.zeros(1, 3, 4, 32, dtype=torch.bfloat16),) * 2
    rows = PagedRows(none, none, none.view(0, 1), None, None)
    query = torch.empty(0, 9, 32, dtype=torch.bfloat16)
    assert kernels.attend(query, pages, rows, LayerCall(0, 1.0)).shape == (0, 9, 32)
