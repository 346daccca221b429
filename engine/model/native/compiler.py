"""From kernels.cpp to a shared library in the cache: one second once, then nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from engine.errors import EngineError

SOURCE = Path(__file__).with_name("kernels.cpp")
BUNDLED = Path("share", "slipstream", "native")  # below sys.prefix: what an image without a compiler brings
_COMPILERS = ("c++", "g++", "clang++")
# By name and not -march=native, so that one library serves every machine that has these.
_FLAGS = (
    *("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx2", "-mfma"),
)
_TIME_LIMIT_S = 120


class NativeUnavailable(EngineError):
    """The kernels cannot be had on this machine; the message says why."""


def library(home: Path, prefix: Path | None = None) -> Path:
    """The compiled kernels: those installed below `prefix` (None: this Python's), else from below `home`.

    Compiled where they are not there yet, for this source and these flags. Raises NativeUnavailable.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        raise NativeUnavailable("the CPU has no AVX-512 BF16")
    name = f"kernels-{_digest()}.so"
    bundled = Path(sys.prefix if prefix is None else prefix) / BUNDLED / name
    if bundled.is_file():
        return bundled
    target = home / "native" / name
    if not target.is_file():
        compile_into(target)
    return target


def compile_into(target: Path) -> None:
    """Compile to `target`, which is complete or not there at all. Raises NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler ({', '.join(_COMPILERS)})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, target.name)
            command = [compiler, *_FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIME_LIMIT_S)
            os.replace(made, target)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise NativeUnavailable(f"{compiler} failed: {lines[0][:200]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the kernels could not be compiled ({type(error).__name__})") from error


def _digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
