"""A C++ compiler for tests, which gives again what it was asked for before, in this run or in one before.

Many tests, in several processes, need the same kernels, some in a folder of their own. To compile them takes
longer than what those tests look at. Another source, other flags and another compiler are compiled anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

NAMES = ("c++", "g++", "clang++")
MOST_KEPT = 40  # libraries of up to a megabyte: a few states of the source, in all their forms


def put_first(kept: Path | None) -> Path | None:
    """Let this process and those that it starts find it before the real one; None where there is none.

    The folder returned holds the compiler, and what it has compiled where `kept` is not a folder for that. It
    is the caller's to remove at the end.
    """
    real = next(filter(None, map(shutil.which, NAMES)), None)
    if real is None:
        return None
    folder = Path(mkdtemp(prefix="slipstream-compiled-"))
    if kept is not None:
        _forget_the_oldest(kept)
    program = folder / NAMES[0]
    words = " ".join(f'"{word}"' for word in (sys.executable, "-IS", __file__, kept or folder, real))
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(folder), os.environ["PATH"]))
    return folder


def _forget_the_oldest(kept: Path) -> None:
    libraries = [path for path in kept.iterdir() if not path.suffix]
    for library in sorted(libraries, key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
        library.unlink(missing_ok=True)


def compile_once(folder: Path, real: str, words: list[str]) -> int:
    """The exit status of the compiler `real`; a result is kept in `folder`, a failure is not.

    Who asks for what is being compiled waits for it.
    """
    sources = [Path(word) for word in words if word.endswith(".cpp") and Path(word).is_file()]
    if not sources or "-o" not in words:
        return subprocess.run([real, *words], check=False).returncode
    place = words.index("-o") + 1
    compiler = Path(real).resolve().stat()
    asked = (words[:place], words[place + 1 :], real, compiler.st_size, compiler.st_mtime_ns)
    digest = hashlib.sha256(repr(asked).encode())
    for file in sorted(each for source in sources for each in source.resolve().parent.glob("*.[ch]*")):
        digest.update(file.read_bytes())
    kept = folder / digest.hexdigest()
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            status = subprocess.run([real, *words], check=False).returncode
            if status:
                return status
            made = kept.with_suffix(".part")
            shutil.copy(words[place], made)
            made.replace(kept)  # whole or not at all, whenever this is killed
            return 0
        os.utime(kept)
    shutil.copy(kept, words[place])
    return 0


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
