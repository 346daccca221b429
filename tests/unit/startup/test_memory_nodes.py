"""Memory is spread over the nodes whose cores compute, and a policy that was given stays."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from engine.startup.memory_nodes import memory_nodes, spread_memory, usable_nodes

T = TypeVar("T")

on_linux = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"), reason="Linux's calls"
)


def in_a_thread(function: Callable[[], T]) -> T:
    """What a function gives on a thread of its own: a policy is a thread's, and ends with it."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of eight processors with their siblings, and one of memory alone."""
    for node, text in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(text)
    (tmp_path / "possible").write_text("0-2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("processors", "expected"),
    [(set(range(16)), (0, 1)), ({0, 1, 9}, (0,)), ({15}, (1,)), ({99}, ()), (set(), ())],
)
def test_nodes_whose_processors_may_be_used(
    tmp_path: Path, processors: set[int], expected: tuple[int, ...]
) -> None:
    assert memory_nodes(processors, two_sockets(tmp_path)) == expected


def test_a_system_that_shows_no_nodes(tmp_path: Path) -> None:
    assert memory_nodes({0, 1}, tmp_path / "none") == ()


@on_linux
def test_the_system_spreads_the_memory_of_the_thread_that_asks() -> None:
    """Asked of the kernel itself, with the nodes of this machine."""
    nodes = usable_nodes() or (0,)

    def spread_twice() -> tuple[bool, str, bool]:
        spread = spread_memory(nodes)
        maps = Path("/proc/thread-self/numa_maps")
        return spread, maps.read_text() if maps.exists() else "", spread_memory(nodes)

    spread, maps, again = in_a_thread(spread_twice)
    if not spread:
        pytest.skip("this container forbids the call")
    assert "interleave" in maps or not maps
    assert not again  # since a policy was given


@on_linux
def test_a_policy_that_was_given_stays() -> None:
    def prefer_then_spread() -> tuple[int, bool]:
        number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
        prefer_local = 4
        return ctypes.CDLL(None).syscall(number, prefer_local, None, 0), spread_memory((0,))

    given, spread = in_a_thread(prefer_then_spread)
    if given != 0:
        pytest.skip("this container forbids the call")
    assert not spread


@on_linux
def test_a_node_that_is_not_there_is_refused() -> None:
    assert in_a_thread(lambda: spread_memory((900,))) is False


def test_another_system_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert not spread_memory((0, 1))
