"""`python -m tests.bench [names...] [--runs N] [--json FILE] [--model MODEL]`; see README.md beside this."""

from __future__ import annotations

import sys

from engine import prepare_process


def main() -> int:
    """Tune this process as the server tunes itself, which must come before torch, then measure."""
    prepare_process()
    from tests.bench.command import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
