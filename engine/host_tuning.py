"""What the process must be told before torch is loaded, so that compute threads share a small machine well.

Nothing here changes a result; what the user has set in the environment wins.
"""

from __future__ import annotations

import ctypes
import os

# Rounds an idle OpenMP worker spins before it sleeps. The default spins for milliseconds: on a machine whose
# cores also serve HTTP, every parallel region then waits for a core that another thread spins on.
SPIN_ROUNDS = 10_000

# glibc's own parameter numbers (malloc.h) and the largest threshold it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 1 << 30
_LARGEST_MMAP_THRESHOLD = 32 << 20


def prepare_process() -> None:
    """Set how OpenMP workers wait and how freed memory is kept; call once, before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Make glibc reuse the memory of a step's tensors instead of giving it back and faulting it in again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    for parameter, value in (
        (_TRIM_THRESHOLD, _KEEP_BYTES),
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_ARENA_MAX, 1),  # other arenas are too small to keep it
    ):
        mallopt(parameter, value)
