"""ComputeTeam: the threads that kernels compute with."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.records import INDEX, POINTER


class ComputeTeam:
    """`size` threads of a library's kernels, the calling one among them; see team.h.

    One caller at a time has them all. Who calls while another has them computes on its own thread, with the
    same bits. Threads that have nothing to do sleep.
    """

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._make = library_function(library, "slip_team", INDEX, result=POINTER)
        self._end = library_function(library, "slip_end_team", POINTER)
        self._limit = library_function(library, "slip_limit_team", POINTER, INDEX)
        self.size = self._members = size
        self.handle: int = self._make(size)

    def resize(self, size: int) -> None:
        """Have `size` threads from now on. Not while a kernel runs."""
        if size != self.size:
            self._end(self.handle)
            self.size, self.handle = size, self._make(size)
            self._members = size

    def limit(self, count: int) -> None:
        """Have `count` of them take part from the next kernel on, 1 to `size`; the others sleep.

        At any time, also while kernels run; on one thread. Bits stay the same.
        """
        if count != self._members:  # each pass says it
            self._members = count
            self._limit(self.handle, count)

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._end(handle)


def load_library(path: Path) -> ctypes.CDLL:
    """The shared library at `path`. Raises NativeUnavailable if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} cannot be loaded ({error})") from error


def library_function(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Any:
    """The library's function of that name, with the types of its arguments and its result (None for none)."""
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, result
    return found
