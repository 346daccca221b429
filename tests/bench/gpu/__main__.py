"""`python -m tests.bench.gpu [names...] [--json FILE] [--small]`; see README.md one folder up."""

from __future__ import annotations

import sys

from engine import prepare_process


def main() -> int:
    """Tune this process as the server tunes itself, which must come before torch, then measure."""
    prepare_process()
    from tests.bench.gpu.command import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
