"""The arithmetic of the benchmarks: percentiles, burst figures, steady steps."""

from __future__ import annotations

import statistics

import pytest

from tests.bench.streams import BurstFigures, StreamRecord, gaps_of, percentile, steady_step_s


def test_percentiles_interpolate_and_do_not_need_sorted_values() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 0) == 1.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert percentile([float(value) for value in range(101)], 99) == 99.0


def test_percentile_agrees_with_the_standard_library() -> None:
    values = [float(7 * n % 31) for n in range(31)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, percent) for percent in range(1, 100)] == pytest.approx(cuts)


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_gaps() -> None:
    assert gaps_of([1.0, 1.5, 3.0]) == [0.5, 1.5]
    assert gaps_of([1.0]) == []


def test_a_burst_counts_tokens_from_the_first_request_to_the_last_event() -> None:
    records = [
        StreamRecord(10.0, (10.1, 10.2, 10.4), num_prompt_tokens=5, num_output_tokens=3),
        StreamRecord(10.2, (10.7, 11.0), num_prompt_tokens=5, num_output_tokens=7, num_cached_tokens=4),
    ]
    figures = BurstFigures.of(records)
    assert figures.output_tokens_per_s == pytest.approx(10 / 1.0)
    assert figures.ttft_p50_ms == pytest.approx((100 + 500) / 2)
    assert figures.ttft_p99_ms == pytest.approx(100 + 0.99 * 400)
    assert figures.itl_p50_ms == pytest.approx(200)  # of 100, 200, 300
    assert figures.decode_tokens_per_s == pytest.approx((2 / 0.3 + 6 / 0.3) / 2)
    assert figures.tokens_per_event == 2.0
    assert figures.cached_tokens == 4


def test_a_single_event_says_nothing_of_the_decode_rate() -> None:
    assert BurstFigures.of([StreamRecord(0.0, (1.0,), 1, 1)]).decode_tokens_per_s == 0.0


def test_a_silent_stream_is_an_error_and_not_a_fast_one() -> None:
    with pytest.raises(ValueError, match="without any output"):
        BurstFigures.of([StreamRecord(0.0, (), num_prompt_tokens=1, num_output_tokens=0)])


def test_a_record_survives_its_way_through_json() -> None:
    record = {
        "sent": 1.0,
        "event_times": [1.5, 2.0],
        "num_prompt_tokens": 3,
        "num_output_tokens": 2,
        "num_cached_tokens": 0,
    }
    assert StreamRecord.from_json(record) == StreamRecord(1.0, (1.5, 2.0), 3, 2)


def test_steady_steps_leave_out_the_start_and_the_end() -> None:
    # Two steps of 5 s while the second stream is still prefilled, then steps of 1 s for both, then the second
    # stream alone at 0.1 s a step.
    first = [0.0, 5.0, 10.0, 11.0, 12.0, 13.0]
    second = [10.0, 11.0, 12.0, 13.0, 13.1, 13.2]
    assert steady_step_s([first, second], settle=1) == pytest.approx(1.0)
    assert steady_step_s([first, second], settle=2) == pytest.approx(1.0)


def test_streams_that_never_overlap_have_no_steady_step() -> None:
    with pytest.raises(ValueError, match="never decoding all at once"):
        steady_step_s([[0.0, 1.0], [2.0, 3.0]], settle=1)
