"""A C++ compiler for one run of the tests, which gives again what it was asked for before.

Many tests, in several processes, need the same kernels, some in a folder of their own. To compile them takes
longer than what those tests look at.
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


def put_first() -> Path | None:
    """Let this process and those that it starts find it before the real one; None where there is none.

    The folder returned holds what was compiled. It is the caller's to remove at the end.
    """
    real = next(filter(None, map(shutil.which, NAMES)), None)
    if real is None:
        return None
    folder = Path(mkdtemp(prefix="slipstream-compiled-"))
    program = folder / NAMES[0]
    words = " ".join(f'"{word}"' for word in (sys.executable, "-IS", __file__, folder, real))
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(folder), os.environ["PATH"]))
    return folder


def compile_once(folder: Path, real: str, words: list[str]) -> int:
    """The exit status of the compiler `real`; a result is kept in `folder`, a failure is not.

    Who asks for what is being compiled waits for it.
    """
    sources = [Path(word) for word in words if word.endswith(".cpp") and Path(word).is_file()]
    if not sources or "-o" not in words:
        return subprocess.run([real, *words], check=False).returncode
    place = words.index("-o") + 1
    digest = hashlib.sha256(repr((words[:place], words[place + 1 :])).encode())
    for file in sorted(each for source in sources for each in source.resolve().parent.glob("*.[ch]*")):
        digest.update(file.read_bytes())
    kept = folder / digest.hexdigest()
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            status = subprocess.run([real, *words], check=False).returncode
            if status:
                return status
            shutil.copy(words[place], kept)
            return 0
    shutil.copy(kept, words[place])
    return 0


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
