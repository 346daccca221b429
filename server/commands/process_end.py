"""How a process ends whose threads may be in native code, which would crash an orderly end."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process although threads run; what was logged and printed is written first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(code)


def leave_others(code: int, known: Collection[threading.Thread]) -> int:
    """`code`, unless threads beside those `known` still run: then the process ends with it here."""
    if set(threading.enumerate()) - set(known):
        leave(code)
    return code
