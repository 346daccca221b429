"""Compile the kernels for CPUs once, to where an installation under a prefix finds them.

Run while an image is built, by a compiler that the image need not bring: `python bundle_kernels.py PREFIX`.
The machine that builds need not be one that the kernels are for.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from engine.compute.native.compiler import bundled_library, compile_into


def main(prefix: Path) -> None:
    """Raises NativeUnavailable when compiling fails; does nothing for processors of another kind."""
    if platform.machine() in ("x86_64", "AMD64"):
        compile_into(bundled_library(prefix))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
