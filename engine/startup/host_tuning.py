"""What the process must be told so that compute threads, memory and the garbage collector do not fight it.

Nothing here changes a result; what the user has set in the environment wins.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

# Rounds an idle OpenMP worker spins before it sleeps. The default spins for milliseconds: on a machine whose
# cores also serve HTTP, every parallel region then waits for a core that another thread spins on. Fewer
# rounds than this lose up to a quarter on an idle machine, more lose several times that beside a busy core.
SPIN_ROUNDS = 10_000

# Allocations before a young collection, and how many of those before an older one.
COLLECT_EVERY = (50_000, 20, 100)

# Seconds a thread keeps the interpreter while others wait for it. A short request changes threads dozens
# of times, each as long beside one that computes in Python: at the default of 5 ms, a request of 9 ms took
# 290, and 110 at this.
SWITCH_S = 0.0005

# glibc's own parameter numbers (malloc.h) and the largest threshold it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 1 << 30
_LARGEST_MMAP_THRESHOLD = 32 << 20


def prepare_process() -> None:
    """Set how threads wait for each other and how freed memory is kept.

    Call once, before torch is imported.
    """
    sys.setswitchinterval(SWITCH_S)
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    _keep_freed_memory()


def freeze_imports() -> None:
    """Exempt what was imported from garbage collection: it all stays, and looking through it takes long."""
    gc.freeze()


def freeze_heap() -> None:
    """Exempt all objects that exist now from garbage collection, and collect less often from here on.

    Requests leave few cycles behind, but a full collection over a loaded model stops every stream. Memory
    that loading freed is returned to the system once.
    """
    gc.collect()
    _call_glibc("malloc_trim", 0)
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
    gc.enable()


def _keep_freed_memory() -> None:
    """Make glibc reuse the memory of a step's tensors instead of giving it back and faulting it in again."""
    _call_glibc("mallopt", _TRIM_THRESHOLD, _KEEP_BYTES)
    _call_glibc("mallopt", _MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _call_glibc("mallopt", _ARENA_MAX, 1)  # other arenas are too small to keep it


def _call_glibc(name: str, *numbers: int) -> None:
    """Call a function of glibc's own; other C libraries do without."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)
