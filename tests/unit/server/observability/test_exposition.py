"""Writing samples down: what the library that everybody uses writes, ours reads as, in both formats."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from math import inf, isnan, nan

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from engine import Histogram
from server.observability.exposition import OPENMETRICS_END, Exposition, SeriesNames, accepts_openmetrics

ODD = 'a "quoted" \\ name\nof two lines, {with} braces=and ü'


def make_histogram() -> Histogram:
    histogram = Histogram((0.001, 1.0, 20.0))
    for value in (0.0005, 0.001, 0.5, 20.0, 99.0):
        histogram.observe(value)
    return histogram


def ours(*, openmetrics: bool) -> str:
    page = Exposition(SeriesNames("x_", {"model_name": ODD}), openmetrics=openmetrics)
    page.add("free_ratio", "gauge", "Two\nlines with a \\.", [((), 0.25)])
    page.add("calls", "counter", "Calls.", [((("kind", "a"),), 3), ((("kind", ODD),), 1 << 60)])
    page.add("facts", "info", "Facts.", [((("size", "16"), ("name", ODD)), 1)])
    page.add("none_yet", "counter", "None.", [])
    page.add_histograms("wait_seconds", "Waits.", [((("phase", "b"),), make_histogram())])
    return page.text() + (OPENMETRICS_END if openmetrics else "")


class Theirs(Collector):
    """The same samples."""

    def collect(self) -> Sequence[Metric]:
        common = {"model_name": ODD}
        gauge = GaugeMetricFamily("x_free_ratio", "Two\nlines with a \\.")
        gauge.add_sample("x_free_ratio", common, 0.25)
        counter = CounterMetricFamily("x_calls", "Calls.")
        counter.add_sample("x_calls_total", {**common, "kind": "a"}, 3)
        counter.add_sample("x_calls_total", {**common, "kind": ODD}, 1 << 60)
        info = InfoMetricFamily("x_facts", "Facts.")
        info.add_sample("x_facts_info", {**common, "size": "16", "name": ODD}, 1)
        histogram = HistogramMetricFamily("x_wait_seconds", "Waits.", labels=["model_name", "phase"])
        buckets = [("0.001", 2.0), ("1.0", 3.0), ("20.0", 4.0), ("+Inf", 5.0)]
        histogram.add_metric([ODD, "b"], buckets, sum_value=make_histogram().sum)
        return [gauge, counter, info, CounterMetricFamily("x_none_yet", "None."), histogram]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_it_reads_as_what_the_library_writes(openmetrics: bool) -> None:
    registry = CollectorRegistry()
    registry.register(Theirs())
    encode, _ = choose_encoder("application/openmetrics-text" if openmetrics else "")
    parse = parse_openmetrics if openmetrics else parse_text
    expected = list(parse(encode(registry).decode()))
    assert list(parse(ours(openmetrics=openmetrics))) == expected
    assert len(expected) == 5


def test_any_number_can_be_written() -> None:
    values = [0, 7, 0.1, 1e300, 1e-300, inf, -inf, nan, True]
    page = Exposition(SeriesNames("", {}), openmetrics=False)
    page.add("number", "gauge", "Any.", [((("of", str(i)),), value) for i, value in enumerate(values)])
    (family,) = parse_text(page.text())
    read = [sample.value for sample in family.samples]
    assert [value for value in read if not isnan(value)] == [value for value in values if not isnan(value)]
    assert isnan(read[7])


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/openmetrics-text", True),
        ("text/plain;q=0.1, application/openmetrics-text;version=1.0.0;charset=utf-8;q=0.9", True),
        ("application/openmetrics-text-of-my-own", False),
    ],
)
def test_openmetrics_is_for_those_that_ask(accept: str, expected: bool) -> None:
    assert accepts_openmetrics(accept) is expected


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_page_has_the_samples_of_its_own_time(openmetrics: bool) -> None:
    """Though families that are as they were on the last page are not written again."""
    names, counted = SeriesNames("x_", {}), make_histogram()

    def page(names: SeriesNames, calls: float) -> str:
        page = Exposition(names, openmetrics=openmetrics)
        page.add("calls", "counter", "Calls.", [((("kind", "a"),), calls), ((("kind", "b"),), 1)])
        page.add_histograms("wait_seconds", "Waits.", [((), counted)])
        return page.text()

    pages = [page(names, calls) for calls in (0, 0, 2, 0)]
    counted.observe(0.25)
    pages.append(page(names, 0))
    assert pages[0] == pages[1] == pages[3]
    assert len(set(pages)) == 3
    assert pages[2] != pages[4] == page(SeriesNames("x_", {}), 0)


def test_series_that_come_and_go_are_not_remembered_for_ever() -> None:
    names = SeriesNames("x_", {"model_name": "m"})

    def scrape(numbers: range) -> None:
        for i in numbers:
            page = Exposition(names, openmetrics=False)
            page.add("share", "gauge", "Of a tenant.", [((("tenant", f"user-{i}"),), 0.5)])
            assert f'tenant="user-{i}"}} 0.5' in page.text()

    scrape(range(10_000))
    tracemalloc.start()
    scrape(range(10_000, 40_000))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 4 << 20
