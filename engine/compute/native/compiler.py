"""From kernels.cpp and its headers to a shared library in the cache: some ten seconds once, then nothing.

A library is code. What an installation brings is trusted as the rest of it; what lies below a home only where
nobody but this user can have put it there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from engine.compute.native.forms import KernelBuild, NativeUnavailable, forms_of

SOURCE = Path(__file__).with_name("kernels.cpp")
BUNDLED = Path("share", "slipstream", "native")  # below a prefix: what an image without a compiler brings
_COMPILERS = ("c++", "g++", "clang++")
# Products are fused with sums only where the source says so: a row's bits must not depend on its tile.
_PLAIN_FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-pthread", "-fPIC", "-shared", "-Wno-psabi")
# A library for other machines must not ask for this one's C++ library.
_ALONE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
_FLAGS = (*_PLAIN_FLAGS, *(_ALONE if sys.platform == "linux" else ()))
_TIME_LIMIT_S = 600  # one on a busy machine that takes too long would fail again at each start
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


log = logging.getLogger("slipstream.model")


def library(home: Path, build: KernelBuild, prefix: Path | None = None) -> Path:
    """The compiled kernels: those installed below `prefix` (None: this Python's), else from below `home`.

    Compiled where they are not there whole, for this source and these flags. Raises NativeUnavailable.
    """
    found = find_library(home, build, prefix)
    if found is None:
        found = home / "native" / file_name(build)
        _settle(home)
        compile_into(found, build)
    return found


def find_library(home: Path, build: KernelBuild, prefix: Path | None = None) -> Path | None:
    """Where `library` finds the kernels without compiling anything; None where it would have to.

    One with formats serves models without them too and comes first, so that a model has all from one library.
    """
    bundled = bundled_library(Path(sys.prefix if prefix is None else prefix), build)
    if _is_whole(bundled):
        return bundled
    folder = home / "native"
    if not (_is_settled(home) and _is_ours(folder)):
        return None
    files = (folder / file_name(each) for each in (replace(build, formats=True), build))
    return next((file for file in files if _is_ours(file) and _is_whole(file)), None)


def bundled_library(prefix: Path, build: KernelBuild) -> Path:
    """Where an installation under `prefix` has the kernels of this source, if at all. They have formats."""
    return prefix / BUNDLED / file_name(replace(build, formats=True))


def compile_all(prefix: Path, machine: str | None = None) -> list[Path]:
    """Every form and dtype for CPUs of a kind, with formats, for an installation below `prefix`.

    This CPU need not have the instructions; for another `machine` than this one (as Python's `platform` calls
    it) it takes that one's cross compiler. Raises NativeUnavailable when compiling fails.
    """
    made = []
    compiler = None if machine is None else find_compiler((f"{machine}-linux-gnu-g++",))
    kinds = ((form, dtype) for form in forms_of(machine) for dtype in form.dtypes)
    for build in (KernelBuild(form, dtype, formats=True) for form, dtype in kinds):
        made.append(bundled_library(prefix, build))
        compile_into(made[-1], build, compiler)
    return made


def find_compiler(names: tuple[str, ...] | None = None) -> str:
    """The C++ compiler that would be used, of these names. Raises NativeUnavailable if there is none."""
    names = _COMPILERS if names is None else names
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise NativeUnavailable(f"there is no C++ compiler ({', '.join(names)})")
    return found


def compile_into(target: Path, build: KernelBuild, compiler: str | None = None) -> None:
    """Compile to `target`, which is complete or as it was before; only this user can write there.

    `compiler` None is the one of this machine. Raises NativeUnavailable, also where the directory is another
    user's.
    """
    compiler = find_compiler() if compiler is None else compiler
    log.info("compiling kernels for this CPU, once")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _close(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, target.name)
            command = [compiler, *_FLAGS, *build.flags, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIME_LIMIT_S)
            with made.open("ab") as file:
                file.write(_seal(made.read_bytes()))
            made.chmod(0o644)
            os.replace(made, target)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        told = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailable(f"{compiler} failed: {told[:200]}") from None
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{compiler} took more than {_TIME_LIMIT_S} s") from None
    except OSError as error:
        raise NativeUnavailable(f"{target.parent} cannot be written to ({error.strerror})") from error


def _settle(home: Path) -> None:
    """Have a directory there in which ours stays ours. Raises NativeUnavailable."""
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # said better of the directory that goes into it
    if not _is_settled(home):
        raise NativeUnavailable(f"{home} is open to all or belongs to another user: see SLIPSTREAM_HOME")


def _close(folder: Path) -> None:
    """Let nobody else write to a directory of ours. Raises OSError, and NativeUnavailable for another's."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        raise NativeUnavailable(f"{folder} belongs to another user")
    if found.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


def _is_settled(home: Path) -> bool:
    """Whether strangers cannot put another directory in place of ours in there."""
    try:
        found = home.stat()
    except OSError:
        return False
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return _is_own(found, or_roots=True) and not is_open


def _is_ours(path: Path) -> bool:
    """Whether it is no link, this user's, and nobody else can write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(found.st_mode) and _is_own(found) and not found.st_mode & _OTHERS_WRITE


def _is_own(found: os.stat_result, *, or_roots: bool = False) -> bool:
    if os.name != "posix":  # where a user's directories are his by default
        return True
    return found.st_uid == os.geteuid() or (or_roots and found.st_uid == 0)


def _is_whole(file: Path) -> bool:
    """Whether `compile_into` wrote all of it: loading a library that was cut short would kill the process."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    size = len(_seal(b""))
    return len(content) > size and content[-size:] == _seal(content[:-size])


def _seal(content: bytes) -> bytes:
    """What stands behind a whole library's content; loaders do not read so far."""
    return hashlib.sha256(content).digest()


def file_name(build: KernelBuild) -> str:
    """Of the library: another for other source, flags or build."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *build.flags)).encode())
    for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    return f"kernels-{build.form.name}-{digest.hexdigest()[:16]}.so"
