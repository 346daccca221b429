"""Numbers as Grafana writes them, for the units that the dashboards use."""

from __future__ import annotations

import math

_SUFFIXES = {"reqps": " req/s", "ops": " /s", "count:tok/s": " tok/s", "h": " h", "short": ""}
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SECONDS = ((60.0, "min", 60.0), (1.0, "s", 1.0), (1e-3, "ms", 1e-3), (0.0, "µs", 1e-6))


def written(value: float, unit: str) -> str:
    """`value` with its unit, in three digits; what is no number is a dash."""
    if not math.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{_digits(100 * value)} %"
    if unit == "s":
        return _time(value)
    if unit == "bytes":
        return _scaled(value, _BYTES, " B")
    return _scaled(value, _STEPS, "") + _SUFFIXES[unit]


def _time(seconds: float) -> str:
    if not seconds:
        return "0 s"
    name, size = next((name, size) for least, name, size in _SECONDS if abs(seconds) >= least)
    return f"{_digits(seconds / size)} {name}"


def _scaled(value: float, steps: tuple[tuple[float, str], ...], plain: str) -> str:
    for size, name in steps:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return _digits(value) + plain


def _digits(value: float) -> str:
    """Three significant digits, and no more than two places."""
    places = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{places}f}".rstrip("0").rstrip(".") if places else f"{value:.0f}"
