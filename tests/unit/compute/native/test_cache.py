"""Kernels kept below a home that others can write to: only what this user compiled is ever loaded."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.compute.native import compiler
from engine.compute.native.forms import CpuForm, KernelBuild, NativeUnavailable

EVIL = b"evil"

BUILD = KernelBuild(CpuForm("any", (), ()), torch.bfloat16)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that everybody shares, as /tmp is."""
    tmp_path.chmod(0o1777)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a compiler that makes nothing of use was asked to put what it makes."""
    asked: list[Path] = []

    def compile(command: list[str], **_: Any) -> None:
        made = Path(command[command.index("-o") + 1])
        asked.append(made)
        made.write_bytes(b"ours")

    monkeypatch.setattr(compiler, "find_compiler", lambda: "c++")
    monkeypatch.setattr(subprocess, "run", compile)
    return asked


def plant(home: Path, mode: int = 0o644, folder_mode: int = 0o755) -> Path:
    """A library that is whole, as anybody can make one."""
    file = home / "native" / compiler.file_name(BUILD)
    file.parent.mkdir()
    file.write_bytes(EVIL + compiler._seal(EVIL))
    file.chmod(mode)
    file.parent.chmod(folder_mode)
    return file


def become_another(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """What is there is another user's from now on."""
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)


def test_what_we_compiled_is_found_again(home: Path, compiled: list[Path]) -> None:
    made = compiler.library(home, BUILD, home / "prefix")
    assert made.read_bytes().startswith(b"ours")
    assert compiler.library(home, BUILD, home / "prefix") == made
    assert len(compiled) == 1


def test_what_another_user_planted_is_neither_loaded_nor_written_beside(
    home: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(home)
    become_another(monkeypatch, home)
    assert compiler.find_library(home, BUILD, home / "prefix") is None
    with pytest.raises(NativeUnavailable, match="belongs to another user"):
        compiler.library(home, BUILD, home / "prefix")
    assert compiled == []


@pytest.mark.parametrize(
    ("mode", "folder_mode"), [(0o664, 0o755), (0o646, 0o755), (0o644, 0o775), (0o644, 0o1777)]
)
def test_what_others_could_have_written_is_compiled_again_where_they_cannot(
    home: Path, compiled: list[Path], mode: int, folder_mode: int
) -> None:
    file = plant(home, mode, folder_mode)
    assert compiler.find_library(home, BUILD, home / "prefix") is None
    assert compiler.library(home, BUILD, home / "prefix") == file
    assert file.read_bytes().startswith(b"ours")
    assert [stat.S_IMODE(each.stat().st_mode) & 0o022 for each in (file, file.parent)] == [0, 0]
    assert compiler.find_library(home, BUILD, home / "prefix") == file


def test_a_friendly_umask_does_not_have_them_compiled_at_each_start(home: Path, compiled: list[Path]) -> None:
    before = os.umask(0o002)
    try:
        compiler.library(home, BUILD, home / "prefix")
        assert compiler.find_library(home, BUILD, home / "prefix") is not None
    finally:
        os.umask(before)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_to_elsewhere_are_not_followed(home: Path, compiled: list[Path], linked: str) -> None:
    file = plant(home)
    planted = file if linked == "file" else file.parent
    planted.rename(home / "elsewhere")
    planted.symlink_to(home / "elsewhere")
    assert compiler.find_library(home, BUILD, home / "prefix") is None
    if linked == "folder":
        with pytest.raises(NativeUnavailable, match="belongs to another user"):
            compiler.library(home, BUILD, home / "prefix")
    else:
        assert compiler.library(home, BUILD, home / "prefix") == file
        assert not file.is_symlink() and file.read_bytes().startswith(b"ours")


def test_a_home_in_which_anybody_can_put_another_folder_in_place_of_ours_is_not_used(
    home: Path, compiled: list[Path]
) -> None:
    plant(home)
    home.chmod(0o777)
    assert compiler.find_library(home, BUILD, home / "prefix") is None
    with pytest.raises(NativeUnavailable, match="open to all"):
        compiler.library(home, BUILD, home / "prefix")


def test_a_library_with_formats_serves_models_without(home: Path, compiled: list[Path]) -> None:
    """Not the other way round: compiled without formats, a library knows none."""
    with_formats = replace(BUILD, formats=True)
    plain = compiler.library(home, BUILD, home / "prefix")
    assert compiler.find_library(home, with_formats, home / "prefix") is None
    made = compiler.library(home, with_formats, home / "prefix")
    assert made != plain and len(compiled) == 2
    assert compiler.find_library(home, BUILD, home / "prefix") == made
    assert [build for build in (BUILD, with_formats) if "-DSLIP_FORMATS" in build.flags] == [with_formats]


def test_what_an_installation_brings_is_as_good_as_its_code(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = compiler.bundled_library(home / "prefix", BUILD)
    bundled.parent.mkdir(parents=True)
    bundled.write_bytes(EVIL + compiler._seal(EVIL))
    become_another(monkeypatch, home)
    assert compiler.find_library(home, BUILD, home / "prefix") == bundled
