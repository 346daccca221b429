"""Which sizes of steps are recorded."""

from __future__ import annotations

import pytest

from engine.compute.cuda.graphs.graph_shapes import GraphShape, StepSize, graph_shapes


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 256, 257, 300, 512, 1000, 1024])
def test_every_batch_of_decodes_has_a_recording(max_num_seqs: int) -> None:
    shapes = graph_shapes(max_num_seqs, max_draft_tokens=0)
    for size in range(1, max_num_seqs + 1):
        fitting = min(shape.num_tokens for shape in shapes if shape.holds(StepSize(size, 1, size)))
        assert fitting - size <= (fitting // 4 if size > 256 else 1 + fitting // 2), "the rest is padding"


def test_no_recording_is_larger_than_needed() -> None:
    assert max(graph_shapes(300, 0)) == GraphShape(320)
    assert {shape.num_tokens for shape in graph_shapes(5, 0)} == {1, 2, 4, 8}


def test_the_largest_comes_first() -> None:
    shapes = graph_shapes(512, 3)
    assert shapes == sorted(shapes, reverse=True)


def test_steps_with_drafts_are_recorded_beyond_256_tokens() -> None:
    assert any(shape.holds(StepSize(70 * 6, 6, 70 * 6)) for shape in graph_shapes(70, 5))


def test_steps_with_prompts_have_recordings_up_to_the_tokens_of_a_step() -> None:
    shapes = [shape for shape in graph_shapes(64, 5, 500) if shape.num_rows]
    assert max(shape.num_tokens for shape in shapes) == 512
    for size in range(1, 501):
        fitting = min(shape for shape in shapes if shape.holds(StepSize(size, size, 1)))
        assert fitting.num_tokens - size <= max(63, fitting.num_tokens // 3), "the rest is padding"
        assert fitting.num_rows == min(fitting.num_tokens, 64 * 6)
        assert not fitting.holds(StepSize(size, size, fitting.num_rows + 1))
    assert not any(shape.num_rows for shape in graph_shapes(64, 5))


def test_beside_prompts_no_more_rows_are_drawn_than_steps_with_drafts_have() -> None:
    """Logits and a draw for every one of 2,048 tokens would be paid for by each step, drafts or not."""
    shapes = [shape for shape in graph_shapes(256, 16, 2048) if shape.num_rows]
    assert max(shape.num_places for shape in shapes) == 512
    many = [shape for shape in graph_shapes(1024, 16, 2048) if shape.num_rows]
    assert max(shape.num_places for shape in many) == 1024, "every sequence has its row"
