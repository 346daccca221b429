"""The command line of the benchmarks, the workloads of a run, and what counts as the work asked for."""

from __future__ import annotations

import pytest

from tests.bench.command import BENCHMARKS, NEED_MORE, plan, read_arguments
from tests.bench.contenders import OURS, Comparison
from tests.bench.gguf import CASES, LLAMA, compared
from tests.bench.host import BATCHES, growth, steps_for
from tests.bench.load import TIME_BOX_S, WrongOutput, checked_figures, ratio_bars, section_of
from tests.bench.streams import BurstFigures, StreamRecord
from tests.bench.workloads import Prompt, Workload


def test_all_benchmarks_run_by_default_and_load_runs_once() -> None:
    assert read_arguments([]).names == []
    assert len(plan([])) == len(BENCHMARKS) - 1 - len(NEED_MORE)  # two are one run
    assert plan(["transformers", "host"]) == [BENCHMARKS["host"], BENCHMARKS["transformers"]]
    assert plan(["served"]) == [BENCHMARKS["served"]]


@pytest.mark.parametrize("argv", [["nonsense"], ["host", "--runs", "0"], ["gguf", "--gguf", "x"]])
def test_a_wrong_command_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments(argv)
    assert "error" in capsys.readouterr().err


WORKLOAD = Workload("W2", "two", (Prompt("a", (1, 2)), Prompt("b", (3,))), 4)


def records(*shapes: tuple[int, int], last: float = 2.0) -> list[StreamRecord]:
    return [StreamRecord(0.0, (1.0, last), num_prompt, num_output) for num_prompt, num_output in shapes]


def test_a_burst_that_did_the_work_counts() -> None:
    assert checked_figures(WORKLOAD, records((2, 4), (1, 4))).output_tokens_per_s == 4.0


@pytest.mark.parametrize("shapes", [[(2, 4)], [(2, 4), (1, 3)], [(2, 4), (2, 4)], [(1, 4), (2, 4)]])
def test_a_burst_that_did_other_work_does_not_count(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(WrongOutput, match="W2"):
        checked_figures(WORKLOAD, records(*shapes))


def figures(rate: float) -> BurstFigures:
    return BurstFigures.of([StreamRecord(0.0, (0.5, 1.0), 1, int(rate))])


def test_the_ratio_is_of_medians_and_a_bound_when_the_other_side_ran_out_of_time() -> None:
    ran = {name: Workload(name, "title", WORKLOAD.prompts, 4) for name in ("W1", "W2", "W3")}
    ours = {name: [figures(rate) for rate in (90, 100, 110)] for name in ran}
    theirs = {"W1": [figures(10)], "W2": [figures(50)], "W3": []}
    w2, w3 = ratio_bars(section_of("served", ours, ran), section_of("transformers", theirs, ran), ran)
    assert (w2.measured, w2.met, w2.bound_only) == (2.0, True, False)
    assert w3.measured == pytest.approx(100 / (2 * 4 / TIME_BOX_S["W3"]))
    assert w3.bound_only


def test_a_gguf_file_is_compared_by_rates_run_by_run() -> None:
    comparison = Comparison()
    for name, seconds in ((OURS, 1.0), (LLAMA, 2.0)):
        record = StreamRecord(0.0, (seconds, 2 * seconds), 1, 8)
        comparison.figures[name] = {case.name: [BurstFigures.of([record])] * 2 for case in CASES}
    section = compared("model", comparison)
    assert [bar.measured for bar in section.bars] == [pytest.approx(2.0)] * len(CASES)
    assert [bar.limit for bar in section.bars] == [1.3, 2.5, 2.5, 1.5, 1.5]


def test_growth_is_one_when_linear() -> None:
    assert growth({batch: 100 + 5.0 * batch for batch in BATCHES}) == pytest.approx(1.0)
    assert growth({batch: 100 + 0.01 * batch**2 for batch in BATCHES}) > 3


def test_more_sequences_are_timed_over_fewer_steps() -> None:
    assert [steps_for(batch) for batch in BATCHES] == sorted((steps_for(b) for b in BATCHES), reverse=True)
    assert steps_for(1024) >= 50
