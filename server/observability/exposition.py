"""Exposition: samples as Prometheus text or OpenMetrics. It knows the formats and none of our metrics.

A library's writer checks and escapes each label anew; that took milliseconds of the event loop a scrape.
Here a series is named once and remembered, so that writing one is a look-up and a number; and a family whose
samples are those of the last page is not written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from math import isfinite, isnan
from typing import Literal, TypeAlias

from engine import Histogram

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = "# EOF\n"

Kind: TypeAlias = Literal["gauge", "counter", "histogram", "info"]
Labels: TypeAlias = tuple[tuple[str, str], ...]

_MOST_NAMES = 4096  # many times a page's
_SUFFIX: dict[Kind, str] = {"gauge": "", "counter": "_total", "histogram": "", "info": "_info"}


def accepts_openmetrics(accept: str) -> bool:
    """Whether a scraper that sends this Accept header can read OpenMetrics."""
    return any(each.partition(";")[0].strip() == "application/openmetrics-text" for each in accept.split(","))


class SeriesNames:
    """Every series' name with its labels, as it is written; made once. `common` labels are on all of them.

    `families` are as they were written last, by name and whether for OpenMetrics: the samples and their text.
    """

    def __init__(self, prefix: str, common: Mapping[str, str]) -> None:
        self.prefix = prefix
        self._common = common
        self._names: dict[tuple[str, Labels], str] = {}
        self._histograms: dict[tuple[str, Labels], list[str]] = {}
        self.families: dict[tuple[str, bool], tuple[object, str]] = {}

    def of(self, name: str, labels: Labels) -> str:
        """One series: `name{label="value",...}` and a space."""
        key = (name, labels)
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= _MOST_NAMES:  # of tenants, say, that come and go
                self._names.clear()
            found = self._names[key] = _series(self.prefix + name, {**self._common, **dict(labels)})
        return found

    def of_histogram(self, name: str, labels: Labels, bounds: Iterable[float]) -> list[str]:
        """The series of its buckets, of its count and of its sum."""
        key = (name, labels)
        found = self._histograms.get(key)
        if found is None:
            own = {**self._common, **dict(labels)}
            edges = [*(_number(bound) for bound in bounds), "+Inf"]
            full = self.prefix + name
            found = [_series(f"{full}_bucket", {**own, "le": edge}) for edge in edges]
            found += [_series(f"{full}_count", own), _series(f"{full}_sum", own)]
            self._histograms[key] = found
        return found


class Exposition:
    """Part of a page being written: families in any order, each once, with all its samples."""

    def __init__(self, names: SeriesNames, *, openmetrics: bool) -> None:
        self._names = names
        self._openmetrics = openmetrics
        self._families: list[str] = []

    def add(self, name: str, kind: Kind, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """A family of gauges, counters or facts. `name` is without the prefix and the suffix of its kind."""
        values = list(samples)

        def lines() -> Iterator[str]:
            series = name + _SUFFIX[kind]
            yield self._head(name, kind, text)
            yield from (self._names.of(series, labels) + _number(value) for labels, value in values)

        self._add(name, values, lines)

    def add_histograms(self, name: str, text: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        """A family of histograms."""
        values = [(labels, each.bounds, tuple(each.counts), each.sum) for labels, each in samples]

        def lines() -> Iterator[str]:
            yield self._head(name, "histogram", text)
            for labels, bounds, counts, total in values:
                up_to = list(accumulate(counts))
                series = self._names.of_histogram(name, labels, bounds)
                for each, value in zip(series, (*up_to, up_to[-1], total), strict=True):
                    yield each + _number(value)

        self._add(name, values, lines)

    def _add(self, name: str, samples: object, lines: Callable[[], Iterator[str]]) -> None:
        """A family's text, written anew where `samples` are not those of the last page."""
        key = name, self._openmetrics
        written = self._names.families.get(key)
        if written is None or written[0] != samples:
            text = "".join(f"{line}\n" for line in lines())
            written = self._names.families[key] = samples, text
        self._families.append(written[1])

    def _head(self, name: str, kind: Kind, text: str) -> str:
        """OpenMetrics names the family, text the series, and has no word for facts."""
        name = self._names.prefix + name
        if not self._openmetrics:
            name += _SUFFIX[kind]
            kind = "gauge" if kind == "info" else kind
        return f"# HELP {name} {_escaped(text)}\n# TYPE {name} {kind}"

    def text(self) -> str:
        """What has been added, each line ended."""
        return "".join(self._families)


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escaped(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if type(value) is int:
        return f"{value}.0"
    if isfinite(value):
        return repr(float(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
