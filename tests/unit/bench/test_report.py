"""Measurements, bars and the JSON that is kept."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.bench.machine import CpuWatch, about
from tests.bench.report import Bar, Measurement, Section, figure, report_json


def test_a_measurement_shows_median_and_range() -> None:
    measurement = Measurement("batch 8", "rate", "tokens/s", (310.0, 290.0, 300.0))
    assert measurement.median == 300.0
    assert measurement.shown() == "300 [290-310]"
    assert Measurement("batch 8", "rate", "tokens/s", (310.0,)).shown() == "310"


def test_what_did_not_finish_has_no_median_and_says_so() -> None:
    measurement = Measurement("W3", "output", "tokens/s", ())
    assert measurement.median is None
    assert measurement.shown() == "not finished"
    assert measurement.to_json()["median"] is None


@pytest.mark.parametrize(
    ("measured", "at_least", "met"),
    [(0.9, True, True), (0.89, True, False), (0.9, False, True), (0.91, False, False), (None, True, False)],
)
def test_a_bar_is_met_on_the_good_side_and_on_the_limit(
    measured: float | None, at_least: bool, met: bool
) -> None:
    assert Bar("bar", 0.9, "x", measured, at_least).met is met


def test_a_bar_says_direction_unit_and_bound() -> None:
    bar = Bar("ratio", 2.0, "x", 3.1, at_least=True, bound_only=True)
    assert (bar.shown_limit(), bar.shown_measured()) == ("≥ 2 x", "> 3.1 x")
    assert Bar("ratio", 2.0, "x", None, at_least=True).shown_measured() == "no figure"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.9045, "0.904"),
        (12.345, "12.3"),
        (999.4, "999"),
        (12345.6, "12,346"),
        (0.00012, "1.2e-04"),
    ],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_a_section_prints_every_case_quantity_and_verdict() -> None:
    section = Section("decode", "engine against bare loop", notes=["a note"], other_cpu_percent=3.2)
    section.add("batch 1", "engine", "tokens/s", [50.0])
    section.add("batch 1", "bare", "tokens/s", [55.0])
    section.add("batch 8", "engine", "tokens/s", [])
    section.bars += [Bar("good", 1.0, "", 2.0, at_least=True), Bar("bad", 1.0, "", 2.0, at_least=False)]
    out = io.StringIO()
    section.show(Console(file=out, width=100))
    text = out.getvalue()
    for part in ("batch 1", "batch 8", "engine", "bare", "not finished", "met", "not met", "a note", "3 %"):
        assert part in text
    assert "measure again" not in text


def test_a_busy_machine_is_called_one() -> None:
    out = io.StringIO()
    Section("host", "host time", other_cpu_percent=55.0).show(Console(file=out, width=100))
    assert "55 % of a core: too much to trust the figures, measure again" in out.getvalue()


def test_the_report_is_plain_json_with_machine_versions_and_runs() -> None:
    section = Section("host", "host time")
    section.add("1 sequence", "step", "µs", [90.0, 110.0, 100.0])
    section.bars.append(Bar("host step", 105.0, "µs", 100.0, at_least=False))
    report = json.loads(json.dumps(report_json(about(), [section])))
    assert {"machine", "versions", "started", "load_average_before"} <= report.keys()
    assert report["machine"]["num_cpus"] >= 1
    host = report["sections"]["host"]
    assert host["measurements"][0]["runs"] == [90.0, 110.0, 100.0]
    assert host["measurements"][0]["median"] == 100.0
    assert host["bars"][0]["met"] is True


def test_our_own_work_is_not_counted_as_others() -> None:
    with CpuWatch() as watch:
        sum(number * number for number in range(3_000_000))
    assert watch.other_percent >= 0  # what others take meanwhile is not ours to know
