"""Byte sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*([A-Za-z]{0,3})", re.ASCII)


def parse_size(value: object) -> object:
    """Bytes in `value`: 1GiB, 512MiB, 1.5GB, or a plain number of bytes.

    What is no string is passed through for the field's own check. Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("not a size")
    unit = _UNITS[match[2].upper()]
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(num_bytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads back: 1GiB, 65KiB, 1000."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def rough_size(num_bytes: int) -> str:
    """A size as a person reads it: 512 MiB, 1.00 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1000 * 2**20 else f"{num_bytes / 2**20:.0f} MiB"
