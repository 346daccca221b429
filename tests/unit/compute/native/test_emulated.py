"""The kernels' ARM form, compiled for that CPU and run by an emulator (`make test-arm`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.compute.native.compiler import SOURCE
from engine.compute.native.forms import ELEMENTS, FORMS

pytestmark = pytest.mark.arm

PROGRAM = Path(__file__).parents[3] / "support/native_check/check.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run_program(folder: Path, program: Path, element: int) -> subprocess.CompletedProcess[str]:
    """What the checks say of the kernels beside the program, for elements of that number."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    (form,) = FORMS["aarch64"]
    flags = ("-O2", "-static", "-std=c++20", "-ffp-contract=off", "-pthread", "-Wno-psabi", *form.flags)
    made = folder / "check"
    command = [COMPILER, *flags, f"-DSLIP_ELEMENT={element}", "-DSLIP_FORMATS", "-o", str(made), str(program)]
    subprocess.run(command, check=True, timeout=120)
    return subprocess.run([EMULATOR, str(made)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("element", range(len(ELEMENTS)), ids=[str(dtype) for dtype in ELEMENTS])
def test_every_answer_is_right(element: int, tmp_path: Path) -> None:
    found = run_program(tmp_path, PROGRAM, element)
    assert (found.returncode, found.stdout) == (0, "all answers are right\n")


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("attention_tile.h", "LOG2_E = 1.44269504f", "LOG2_E = 1.40f"),
        ("vector.h", "(NativeInts{1, 2, 4, 8}", "(NativeInts{1, 2, 4, 4}"),
        ("vector.h", "vpaddq_s16(low, high)", "vpaddq_s16(low, low)"),
        ("block_layout.h", "j * L::HIGH % 8, L::HIGH", "j * L::HIGH % 4, L::HIGH"),
        ("block_products.h", "j = peak.four % 8", "j = peak.four % 4"),
        ("row_blocks.h", "found = b, largest = to[b].scale", "found = b"),
        ("pages.h", "      transpose(r);\n", ""),
        ("products.h", "size = (n + parts - 1)", "size = (n + parts)"),
        ("experts.h", "first += ROW_BLOCK)", "first += 2 * ROW_BLOCK)"),
    ],
)
def test_a_mistake_is_found(file: str, right: str, wrong: str, tmp_path: Path) -> None:
    kernels = tmp_path / "engine/compute/native"
    shutil.copytree(SOURCE.parent, kernels, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    program = tmp_path / "tests/support/native_check/check.cpp"
    program.parent.mkdir(parents=True)
    shutil.copy(PROGRAM, program)
    source = (kernels / file).read_text()
    assert right in source
    (kernels / file).write_text(source.replace(right, wrong))
    found = run_program(tmp_path, program, 0)
    assert found.returncode == 1 and "answers are wrong" in found.stdout
