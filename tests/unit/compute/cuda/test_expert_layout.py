"""How the experts' products are divided: by the number of rows alone."""

from __future__ import annotations

import pytest

from engine.compute.cuda.expert_layout import (
    FEW_ROWS,
    MOST_FOUND,
    Choice,
    ExpertShape,
    layout_for,
    rows_of_each_layout,
    rows_of_each_way,
    step_of,
)

SHAPES = [(ExpertShape(128, 2048, 768), 8), (ExpertShape(8, 4096, 14336), 2), (ExpertShape(4, 64, 32), 2)]


@pytest.mark.parametrize(("shape", "each"), SHAPES)
def test_few_rows_are_all_multiplied_in_the_same_tiles(shape: ExpertShape, each: int) -> None:
    assert {layout_for(count, each, shape).rows for count in range(1, FEW_ROWS + 1)} == {16}


@pytest.mark.parametrize(("shape", "each"), SHAPES)
def test_each_layout_begins_where_it_is_said_to(shape: ExpertShape, each: int) -> None:
    fewest = rows_of_each_layout(each, shape)
    layouts = [layout_for(count, each, shape) for count in fewest]
    assert len({*layouts}) == len(layouts)
    assert [layout_for(count - 1, each, shape) for count in fewest[1:]] == layouts[:-1]
    assert layouts[-1] == layout_for(1_000_000, each, shape)


@pytest.mark.parametrize(("shape", "each"), SHAPES)
def test_few_pairs_need_no_sorting_and_begin_a_tile_each(shape: ExpertShape, each: int) -> None:
    most = min(FEW_ROWS, MOST_FOUND // each)
    found, sorting = (layout_for(count, each, shape) for count in (most, most + 1))
    assert found.most_found == MOST_FOUND and not sorting.most_found
    assert found.num_tiles(most * each, shape.count) == most * each


def test_with_experts_that_all_rows_go_through_many_rows_are_a_way_of_their_own() -> None:
    shape = ExpertShape(64, 2048, 1536, num_shared=1)
    assert rows_of_each_way(Choice(64, 4, num_shared=1), shape) == (1, MOST_FOUND // 5 + 1, FEW_ROWS + 1)


def test_a_tile_takes_whole_lines_of_weights_at_a_time() -> None:
    small, large = (layout_for(count, 8, SHAPES[0][0]) for count in (1, 10_000))
    assert [step_of(2048, 2, layout) for layout in (small, large)] == [128, 64]
    assert [step_of(2880, 2, layout) for layout in (small, large)] == [64, 64]
    assert step_of(2048, 4, small) == 64
