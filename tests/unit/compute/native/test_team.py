"""The threads that kernels compute with: shared, ended, asleep where there is nothing to do."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.compute.native.compiler import find_compiler
from engine.compute.native.forms import choose_build
from engine.compute.native.kernels import NativeKernels
from tests.support.native import compiled_kernels

TASKS = Path("/proc/self/task")
PROGRAM = Path(__file__).parents[3] / "support/native_check/team.cpp"


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_callers_at_once_get_what_each_gets_alone(kernels: NativeKernels, size: int) -> None:
    """More threads than cores lose theirs all the time, and callers find the team taken."""
    weights = kernels.pack(noise(320, 64, seed=1))
    rows = [noise(n, 64, seed=n) for n in (1, 3, 40, 200)]
    kernels.team.resize(1)
    expected = [kernels.linear(x, weights) for x in rows]
    kernels.team.resize(size)
    start = threading.Barrier(len(rows))

    def repeat(index: int) -> bool:
        start.wait()
        return all(torch.equal(kernels.linear(rows[index], weights), expected[index]) for _ in range(300))

    with ThreadPoolExecutor(len(rows)) as pool:
        assert all(pool.map(repeat, range(len(rows))))
    kernels.team.resize(1)


def test_who_is_left_out_sleeps_and_comes_back(kernels: NativeKernels) -> None:
    weights, x = kernels.pack(noise(2048, 2048, seed=1)), noise(64, 2048, seed=2)
    kernels.team.resize(3)
    expected = kernels.linear(x, weights)

    def others_share() -> float:
        """CPU time of all threads but this one over its own, while it computes for a while.

        A sanitizer has a thread of its own, which takes a little of it.
        """
        own, whole = time.thread_time(), time.process_time()
        assert all(torch.equal(kernels.linear(x, weights), expected) for _ in range(20))
        own, whole = time.thread_time() - own, time.process_time() - whole
        return whole / own - 1

    for members in (1, 3, 2, 1):
        kernels.team.limit(members)
        if members == 1:
            others_share()  # who was still awake goes to sleep
            assert others_share() < 0.01
        else:
            assert any(others_share() > 0.01 for _ in range(200)), "on a busy machine they may come late"
    kernels.team.resize(1)


@pytest.mark.parametrize("num_passes", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_limit_may_change_while_kernels_run(kernels: NativeKernels, num_passes: int) -> None:
    """Some threads go to sleep while others are called, and none comes to a call that is over."""
    sizes = (40, 320, 64), (9, 1024, 1024)
    cases = [(noise(n, k, seed=n), kernels.pack(noise(out, k, seed=k))) for n, out, k in sizes]
    kernels.team.resize(4)
    expected = [kernels.linear(*case) for case in cases]

    def compute() -> bool:
        return all(
            torch.equal(kernels.linear(*case), y)
            for _ in range(num_passes)
            for case, y in zip(cases, expected, strict=True)
        )

    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        turn = 0
        while not computing.done():
            turn += 1
            kernels.team.limit(1 + turn % 4)
    assert computing.result()
    assert turn > num_passes / 2
    kernels.team.resize(1)


def test_idle_threads_sleep(kernels: NativeKernels) -> None:
    kernels.team.resize(4)
    kernels.linear(noise(1, 64, seed=1), kernels.pack(noise(320, 64, seed=1)))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
    kernels.team.resize(1)


@pytest.mark.skipif(not TASKS.is_dir(), reason="the kernel shows no threads of a process")
def test_threads_end_with_their_team(kernels: NativeKernels) -> None:
    weights, x = kernels.pack(noise(320, 64, seed=1)), noise(1, 64, seed=2)
    kernels.team.resize(1)
    before = len(list(TASKS.iterdir()))
    for size in (5, 2, 3):
        kernels.team.resize(size)
        assert len(list(TASKS.iterdir())) == before, "threads are made for the first call"
        kernels.linear(x, weights)
        assert len(list(TASKS.iterdir())) == before + size - 1
    kernels.team.resize(1)
    assert len(list(TASKS.iterdir())) == before


def test_loops_are_numbered_anew_before_their_numbers_end(kernels: NativeKernels, tmp_path: Path) -> None:
    """After some months of load: a piece of a loop that nobody takes would never be done."""
    made, flags = tmp_path / "team", choose_build(torch.float32).flags
    command = [
        find_compiler(),
        "-O1",
        "-std=c++20",
        "-pthread",
        "-Wno-psabi",
        *flags,
        "-o",
        str(made),
        str(PROGRAM),
    ]
    subprocess.run(command, check=True, timeout=100)
    subprocess.run([made], check=True, timeout=20)
