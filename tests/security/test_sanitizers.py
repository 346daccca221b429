"""The kernels' own tests with the kernels compiled for ThreadSanitizer, AddressSanitizer and UBSan.

Part of `make test-sanitizers`. The kernels' threads are std::threads, which ThreadSanitizer knows. Torch's
OpenMP is not compiled for it: what torch calls is not looked at, so that only what the kernels do is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.native import compiled_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NATIVE_TESTS = "tests/unit/compute/native"
NO_LIMIT = "allocator_may_return_null=1"  # a test asks for too much


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """`library` comes before all others into the process; `options` are for its environment."""

    flags: str
    library: str
    options: dict[str, str]

    def run(self, *tests: str, bug: str = "") -> tuple[int, str]:
        """The exit status of those tests, and all that they and the sanitizer say."""
        environment = {
            **os.environ,
            # The library of C++ as well, which Python is not linked with: its exceptions are watched, too.
            "LD_PRELOAD": f"{find_library(self.library)} {find_library('libstdc++.so.6')}",
            "PYTHONMALLOC": "malloc",  # each object by itself, so that what lies beside it is nobody's
            **self.options,
        }
        command = (sys.executable, "-m", "tests.support.sanitized", self.flags, bug, "-q", "-s", *tests)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        return ended.returncode, ended.stdout + ended.stderr


THREAD = Sanitizer(
    "-fsanitize=thread", "libtsan.so", {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:{NO_LIMIT}"}
)
MEMORY = Sanitizer(
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "libasan.so",
    {"ASAN_OPTIONS": f"detect_leaks=0:{NO_LIMIT}"},  # Python keeps much to its end
)


def find_library(name: str) -> str:
    """Where the compiler has it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the sanitizers are those of g++, which is not there")
    found = subprocess.run((compiler, f"-print-file-name={name}"), capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no {name}")
    return found.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def _kernels_run_here() -> None:
    compiled_home()


@pytest.mark.parametrize("sanitizer", [THREAD, MEMORY], ids=["thread", "address, undefined"])
def test_the_kernels_are_clean(sanitizer: Sanitizer) -> None:
    status, told = sanitizer.run(NATIVE_TESTS)
    assert status == 0, told


@pytest.mark.parametrize(
    ("sanitizer", "bug", "report", "test"),
    [
        (
            THREAD,
            "race",
            "WARNING: ThreadSanitizer: data race",
            "test_attention.py::test_the_same_bits_in_any_company",
        ),
        (MEMORY, "overflow", "ERROR: AddressSanitizer: heap-buffer-overflow", "test_attention.py"),
        (MEMORY, "shift", "runtime error: shift exponent", "test_attention.py"),
    ],
    ids=["race", "overflow", "shift"],
)
def test_a_planted_bug_is_found(sanitizer: Sanitizer, bug: str, report: str, test: str) -> None:
    status, told = sanitizer.run("-x", f"{NATIVE_TESTS}/{test}", bug=bug)
    assert status != 0 and report in told, told
