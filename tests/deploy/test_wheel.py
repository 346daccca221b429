"""The wheel that brings compiled kernels."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from deploy.wheel.build import build_wheel, platform_tag
from engine.compute.native.compiler import find_library
from engine.compute.native.forms import ELEMENTS, KernelBuild, forms_of
from engine.compute.native.kernels import NativeKernels

EM_AARCH64 = 183  # of the ELF header


def test_the_tag_names_the_oldest_c_library_that_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    libraries = [tmp_path / "a.so", tmp_path / "b.so"]
    libraries[0].write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0")
    libraries[1].write_bytes(b"\x7fELF\0GLIBC_2.17\0GLIBC_2.9\0")
    assert platform_tag(libraries) == "manylinux_2_34_x86_64"
    assert platform_tag(libraries[1:]) == "manylinux_2_17_x86_64"
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-14.0-arm64")
    assert platform_tag(libraries) == "macosx_14_0_arm64"
    assert platform_tag(libraries, "aarch64") == "manylinux_2_34_aarch64"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++"), reason="no cross compiler (Debian: g++-aarch64-linux-gnu)"
)
def test_a_wheel_for_arm_is_made_on_another_machine(tmp_path: Path) -> None:
    made = build_wheel(tmp_path, "aarch64")
    assert re.fullmatch(r"slipstream-[\d.]+-py3-none-manylinux_2_\d+_aarch64\.whl", made.name)
    with zipfile.ZipFile(made) as file:
        libraries = [name for name in file.namelist() if name.endswith(".so")]
        machines = {int.from_bytes(file.read(name)[18:20], "little") for name in libraries}
    assert len(libraries) == len(forms_of("aarch64")) * len(ELEMENTS)
    assert machines == {EM_AARCH64}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installation_from_it_compiles_nothing(tmp_path: Path) -> None:
    made = build_wheel(tmp_path / "dist")
    assert re.fullmatch(r"slipstream-[\d.]+-py3-none-(manylinux_2_\d+|macosx_\w+|win)_\w+\.whl", made.name)
    with zipfile.ZipFile(made) as file:
        file.extractall(tmp_path / "content")
    (prefix,) = (tmp_path / "content").glob("*.data/data")  # what pip puts below the environment
    for form in forms_of():
        for dtype in form.dtypes:
            library = find_library(tmp_path / "home", KernelBuild(form, dtype), prefix)
            assert library is not None
            if form.is_here:
                NativeKernels(library, dtype)
    assert not (tmp_path / "home").exists()
