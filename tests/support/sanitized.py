"""Runs tests of the kernels in this process, compiled for a sanitizer and maybe with a planted bug.

To be started with the sanitizer's own library loaded before everything else; see
tests/security/test_sanitizers.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import pytest
import torch

from engine.compute.native import compiler

NUM_THREADS = (
    4  # that kernels compute with where a test does not say: more than cores, so that they are interrupted
)


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A file of the kernels, and what it says in place of what it said."""

    file: str
    changes: dict[str, str]

    def plant(self, folder: Path) -> None:
        """Into the copy of the kernels in `folder`."""
        source = folder / self.file
        text = source.read_text()
        for right, wrong in self.changes.items():
            assert right in text, f"{self.file} does not say '{right}' any more"
            text = text.replace(right, wrong)
        source.write_text(text)


_IN_ORDER, _IN_ANY_ORDER = (f"wanted, std::memory_order_{order}" for order in ("seq_cst", "relaxed"))
BUGS = {
    # Right on x86, whatever the test: the processor orders memory as the source no longer asks for. Threads
    # that sleep would be ordered by what wakes them.
    "race": PlantedBug(
        "team.h", {_IN_ORDER: _IN_ANY_ORDER, "SPIN_IN_LOOP = 400;": "SPIN_IN_LOOP = 1 << 30;"}
    ),
    "overflow": PlantedBug(
        "attention_desk.h", {"room<float>(2 * tile_records_": "room<float>(tile_records_"}
    ),
    "shift": PlantedBug("tiles.h", {"stop >= KEYS ? ~0ull : ": ""}),
}


def main(flags: list[str], bug: str | None, arguments: list[str]) -> int:
    """The exit status of pytest with those arguments, for kernels compiled with those flags too."""
    os.environ.pop("LD_PRELOAD", None)  # for this process alone, not for its compiler
    flags = ["-O1", "-g", *flags]
    vars(compiler).update(_FLAGS=(*compiler._FLAGS, *flags), _TIME_LIMIT_S=900)
    torch.set_num_threads(NUM_THREADS)
    with TemporaryDirectory() as folder:
        if bug is not None:
            native = Path(copytree(compiler.SOURCE.parent, Path(folder, "native")))
            BUGS[bug].plant(native)
            compiler.SOURCE = native / compiler.SOURCE.name
        return pytest.main(["-p", "no:cacheprovider", "--timeout", "900", *arguments])


if __name__ == "__main__":
    flags, bug, *arguments = sys.argv[1:]
    sys.exit(main(flags.split(), bug or None, arguments))
