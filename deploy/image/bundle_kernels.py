"""Compile the kernels for CPUs once, to where an installation under a prefix finds them.

Run while an image is built, by a compiler that the image need not bring: `python bundle_kernels.py PREFIX`.
The machine that builds need not be one that the kernels are for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.compute.native.compiler import compile_all


def main(prefix: Path) -> None:
    """All forms for CPUs of this machine's kind. Raises NativeUnavailable when compiling fails."""
    compile_all(prefix)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
