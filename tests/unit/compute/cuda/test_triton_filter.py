"""The draw of filtered rows without a sort, through Triton's interpreter; `make test-triton`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.cuda.device_draw import draw_filtered
from engine.compute.cuda.draw_choice import check_filtered_draw
from engine.compute.sampling.noise import row_keys
from engine.compute.sampling.processors import Filters
from engine.plan.step_records import NO_TOKEN
from tests.support.examples import share_of
from tests.support.sampling_reference import CPU, Row, inputs_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import triton_border, triton_filter  # noqa: E402
from engine.compute.cuda.triton_border import Rows  # noqa: E402
from engine.compute.cuda.triton_filter import draw_filtered_at_once  # noqa: E402
from tests.support.kept_tokens import kept_tokens  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # Triton 3.6, numpy 2.3
]
VOCAB = 40


def numpy_masses(gaps: torch.Tensor, filters: Filters) -> torch.Tensor:
    """`masses` by the exponential that the interpreter has: torch's on a CPU may differ in the last bit."""
    scaled = (gaps / -filters.temperature).numpy()
    return torch.from_numpy(np.floor(np.exp(scaled) * np.float32(2**32)).astype(np.float64))


@pytest.fixture(scope="module", autouse=True)
def the_interpreters_masses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.compute.cuda.device_draw.masses", numpy_masses)
        yield


def asked_of(
    logits: torch.Tensor, rows: Sequence[Row]
) -> tuple[torch.Tensor, torch.Tensor, Filters, torch.Tensor]:
    """What both draws take; the rows lie in reverse."""
    inputs, everything = inputs_of(rows), np.arange(len(rows))
    filters = Filters.of_rows(inputs, everything, logits.shape[1], CPU)
    places = torch.from_numpy(everything[::-1].copy())
    return logits.flip(0).contiguous(), places, filters, row_keys(inputs.seed, inputs.position)


def kept_by_sorting(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """What top-k and then top-p keep, token by token in Python's whole numbers."""  # bool [rows, vocab]
    gaps = (logits.float() - logits.amax(1, keepdim=True).float()).abs()
    mass = numpy_masses(gaps, filters).long()
    kept = torch.zeros_like(gaps, dtype=torch.bool)
    for row, order in enumerate(gaps.sort(dim=1, stable=True).indices.tolist()):
        count, share = filters.top_k[row].item(), filters.top_p[row].item()
        order = order[: int(count)] if np.isfinite(count) else order
        needed, before = share * float(mass[row, order].sum()), 0
        for token in order:
            if before and before >= needed:
                break
            kept[row, token] = True
            before += int(mass[row, token])
    return kept


def assert_same(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """The same tokens are kept, and the same ones drawn."""
    lying, places, filters, keys = asked_of(logits, rows)
    given_rows = Rows(lying, places, lying.amax(dim=1), filters)
    assert torch.equal(kept_tokens(given_rows), kept_by_sorting(logits, filters))
    expected = draw_filtered(lying, places, filters, keys)
    assert torch.equal(draw_filtered_at_once(lying, places, filters, keys), expected)


def test_it_passes_the_check_that_it_must_pass_on_a_gpu() -> None:
    check_filtered_draw(draw_filtered_at_once, CPU, num_tokens=700)


ROW = st.builds(
    Row,
    temperature=st.one_of(st.sampled_from([1e-6, 1e6]), st.floats(0.01, 5)),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 20, 39, 40, 100]),
    top_p=st.one_of(st.sampled_from([1.0, 1 - 2**-24, 1e-30, 0.5]), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    seed=st.integers(-(2**63), 2**63 - 1),
)
# Few different numbers: most borders are in the middle of equal tokens.
TIED = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 30.0, float("-inf")]), min_size=VOCAB, max_size=VOCAB)
ANY = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)


@given(st.lists(st.tuples(ROW, st.one_of(TIED, ANY)), min_size=1, max_size=3))
@settings(max_examples=share_of(60), deadline=None)
def test_kept_and_drawn_tokens_are_those_of_the_sort(rows: list[tuple[Row, list[float]]]) -> None:
    logits = torch.tensor([values for _, values in rows])
    logits[:, 7] = logits[:, 7].nan_to_num(neginf=0.5)  # no row of nothing
    assert_same(logits, [row for row, _ in rows])


@pytest.mark.parametrize("programs", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_parts_are_filtered_as_a_whole(
    dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_border, "_PROGRAMS", programs)
    rows = [
        Row(temperature=0.7, top_k=1),
        Row(top_k=20, top_p=0.95, seed=2),
        Row(top_k=1000, top_p=0.5, min_p=0.01, seed=3),
        Row(temperature=2.5, top_p=0.9, seed=4),
        Row(temperature=1e6, top_k=2999, seed=5),
        Row(temperature=0.1, top_p=0.3),
        Row(),  # keeps all
        *(Row(top_k=1100, seed=seed) for seed in range(6)),  # of equal ones, over the end of a part
    ]
    logits = torch.randn(len(rows), 3001, generator=torch.Generator().manual_seed(1)) * 3
    logits[2] = logits[2].round()
    logits[3, ::2] = -torch.inf
    logits[7:] = 1.0
    assert_same(logits.to(dtype), rows)


def test_borders_are_found_among_gaps_of_every_size() -> None:
    gaps = torch.logspace(-40, 37, VOCAB, dtype=torch.float64).float()
    gaps[0], gaps[-2], gaps[-1] = 0, torch.inf, torch.inf
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    logits = -gaps[order].expand(VOCAB - 1, VOCAB)
    assert_same(logits, [Row(top_k=1 + row, seed=row) for row in range(VOCAB - 1)])
    heats = [Row(temperature=10.0 ** (1.8 * row - 35), top_p=0.97, seed=row) for row in range(VOCAB - 1)]
    assert_same(logits, heats)
    assert_same(logits, [replace(row, top_k=VOCAB - 4) for row in heats])  # far out, and from there far in


def test_of_equal_tokens_the_first_are_kept_and_no_more_than_needed() -> None:
    rows = [Row(top_k=3), Row(top_p=0.5), Row(top_k=8, top_p=0.25), Row(top_p=0.0), Row(top_p=0.51)]
    lying, places, filters, _ = asked_of(torch.full((len(rows), 16), 2.0), rows)
    given_rows = Rows(lying, places, lying.amax(dim=1), filters)
    kept = kept_tokens(given_rows)
    assert [row.nonzero().flatten().tolist() for row in kept] == [
        list(range(count)) for count in (3, 8, 2, 1, 9)
    ]


@pytest.mark.parametrize("row", [Row(top_k=3), Row(top_p=0.5), Row(top_k=30, top_p=0.9)])
def test_what_is_not_finite_is_no_token_and_disturbs_no_other_row(row: Row) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, -torch.inf
    asked = asked_of(logits, [row] * 4)
    drawn = draw_filtered_at_once(*asked)
    assert drawn[:3].tolist() == [NO_TOKEN] * 3
    assert drawn[3] == draw_filtered(*asked)[3] != NO_TOKEN


def test_more_rows_than_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_filter, "_ROWS_AT_ONCE", 3)
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0))
    asked = asked_of(logits, [Row(top_k=2 + row, top_p=0.8, seed=row) for row in range(7)])
    assert torch.equal(draw_filtered_at_once(*asked), draw_filtered(*asked))
