"""A quota of processor time is read wherever the kernel shows it, and never raises the number of cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.startup.cpu_limit import thread_counts, usable_cores, whole_cores


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


def cores(tmp_path: Path, groups: str, **files: str) -> int:
    """The cores of a process in those control groups, with those files (__ for a slash) under the mount."""
    mount = tmp_path / "cgroup"
    for name, text in files.items():
        file = mount / name.replace("__", "/").replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "groups").write_text(groups)
    return usable_cores(tmp_path / "groups", mount)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("200000 100000", 2),
        ("max 100000", 64),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("9900000 100000", 64),
    ],
)
def test_a_containers_quota(tmp_path: Path, quota: str, expected: int) -> None:
    assert cores(tmp_path, "0::/\n", cpu_max=f"{quota}\n") == expected


def test_the_smallest_quota_above_the_process_counts(tmp_path: Path) -> None:
    quotas = {"a__cpu_max": "400000 100000", "a__b__cpu_max": "800000 100000", "c__cpu_max": "100000 100000"}
    assert cores(tmp_path, "0::/a/b\n", **quotas) == 4


@pytest.mark.parametrize(("quota", "expected"), [("300000\n", 3), ("-1\n", 64)])
def test_the_older_version(tmp_path: Path, quota: str, expected: int) -> None:
    """Whose container does not see its group under the name that the list has."""
    files = {"cpu__cpu_cfs_quota_us": quota, "cpu__cpu_cfs_period_us": "100000\n"}
    assert cores(tmp_path, "7:memory:/docker/x\n2:cpu:/docker/x\n", **files) == expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == 64


def test_processors_that_share_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5}, raising=False)
    for number, siblings in {0: "0,4", 1: "1,5", 2: "2,6", 4: "0,4", 5: "1,5"}.items():
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert whole_cores(tmp_path) == 3


def test_without_a_word_of_the_kernel_each_processor_is_a_core(tmp_path: Path) -> None:
    assert whole_cores(tmp_path) == 64


@pytest.mark.parametrize(
    ("usable", "whole", "expected"),
    [
        (16, 8, (16, 8, 15)),
        (64, 32, (64, 32, 63)),
        (4, 4, (4, 3)),
        (3, 64, (3,)),
        (2, 1, (2, 1)),
        (2, 2, (2,)),
        (1, 1, (1,)),
    ],
)
def test_which_numbers_of_threads_are_tried(usable: int, whole: int, expected: tuple[int, ...]) -> None:
    assert thread_counts(usable, whole) == expected
