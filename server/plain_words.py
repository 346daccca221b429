"""Numbers as a person reads them: on a terminal, in a report, in a table."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """`number` with its noun: 1 request, 1,200 requests."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 0.5 ms, 87 ms, 6.9 s, 12 min, 3.5 h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
