"""Rows of logits that are worked on at a time: what is made of all rows of a step would be gigabytes."""

from __future__ import annotations

from collections.abc import Iterator

GROUP_LOGITS = 2**22  # of some 20 to 50 bytes of temporaries each, the most for a sort


def in_groups(num_rows: int, row_logits: int) -> Iterator[slice]:
    """Rows of so many logits each that fit into memory together, one at least."""
    size = max(1, GROUP_LOGITS // row_logits)
    return (slice(first, first + size) for first in range(0, num_rows, size))
