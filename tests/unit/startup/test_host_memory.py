"""What cannot be had is a problem, what others have taken a warning; a container's limit counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from config import load_settings
from engine.errors import StartRefused
from engine.startup.build import refused_where_memory_ends
from engine.startup.cpu_limit import group_folders
from engine.startup.diagnosis import CacheFacts, DeviceFacts, Diagnosis, DraftFacts, ModelFacts
from engine.startup.host_memory import memory_bytes, weigh

GIB = 2**30


def found(kv_bytes: int, free_bytes: int | None = None) -> Diagnosis:
    """A model of 1 GiB with so much K/V; on a GPU if its free memory is given."""
    name = "cpu" if free_bytes is None else "cuda:0"
    flag = "--kv-cache-memory" if free_bytes is None else "--gpu-memory-utilization"
    return Diagnosis(
        device=DeviceFacts(name, "", "", {}, "", False, 1, free_bytes=free_bytes),
        model=ModelFacts("m", "", None, None, weight_bytes=GIB),
        cache=CacheFacts(1, 16, kv_bytes, flag, 1, 1, 0, 0, 0),
    )


def told(diagnosis: Diagnosis, memory: tuple[int, int] | None) -> tuple[list[str], list[str]]:
    weigh(diagnosis, memory)
    return diagnosis.problems, diagnosis.warnings


def test_what_fits_is_said_nothing_of() -> None:
    assert told(found(GIB), (4 * GIB, 2 * GIB)) == ([], [])
    assert told(found(GIB), None) == ([], [])


def test_more_than_is_free_is_a_warning_and_more_than_there_is_a_problem() -> None:
    words = "Model and K/V take 4.00 GiB, 2.00 GiB of memory are available: "
    words += "lower --kv-cache-memory, or free some."
    assert told(found(3 * GIB), (4 * GIB, 2 * GIB)) == ([], [words])
    words = "Model and K/V take 6.00 GiB, this machine has 4.00 GiB of memory: lower --kv-cache-memory."
    assert told(found(5 * GIB), (4 * GIB, 2 * GIB)) == ([words], [])


def test_a_gpu_has_no_more_than_is_free() -> None:
    words = (
        "Model and K/V take 6.00 GiB, the GPU has free 4.00 GiB of memory: lower --gpu-memory-utilization."
    )
    assert told(found(5 * GIB, 4 * GIB), (64 * GIB, 64 * GIB)) == ([words], [])
    assert told(found(5 * GIB, 8 * GIB), (GIB, GIB)) == ([], [])


def test_steps_that_a_gpu_has_no_memory_for_are_a_warning() -> None:
    """Where K/V is given: what it gets by itself leaves them room."""
    diagnosis = found(5 * GIB, 8 * GIB)
    assert diagnosis.cache is not None
    diagnosis.cache.work_bytes = GIB
    diagnosis.drafts = DraftFacts(("heads",), reader_work_bytes=GIB)
    assert told(diagnosis, None) == ([], [])
    diagnosis.drafts.reader_work_bytes = 2 * GIB
    words = "Model and K/V take 6.00 GiB and leave too little of what the GPU has free, 8.00 GiB: "
    words += "steps take about 3.00 GiB more. Lower --gpu-memory-utilization."
    assert told(diagnosis, None) == ([], [words])


def test_a_gpus_server_takes_memory_of_the_host_too() -> None:
    diagnosis = found(GIB, 8 * GIB)
    assert diagnosis.cache is not None
    diagnosis.cache.host_bytes = 3 * GIB
    assert told(diagnosis, (8 * GIB, 4 * GIB)) == ([], [])
    words = "Preempted requests may take 3.00 GiB of host memory, 2.00 GiB are available: "
    words += "lower --swap-space, or free some."
    assert told(diagnosis, (8 * GIB, 2 * GIB)) == ([], [words])
    diagnosis.warnings.clear()
    diagnosis.drafts = DraftFacts(("draft-model",), model_bytes=GIB, model_kv_bytes=GIB, is_on_host=True)
    words = (
        "Preempted requests may take 3.00 GiB of host memory beside 2.00 GiB of the draft model, 4.00 GiB "
    )
    assert told(diagnosis, (8 * GIB, 4 * GIB)) == (
        [],
        [words + "are available: lower --swap-space, or free some."],
    )


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n")
    group, mount = tmp_path / "groups", tmp_path / "cgroup"

    def found() -> tuple[int, int] | None:
        return memory_bytes(meminfo, group_folders("memory", group, mount))

    assert found() == (8_192_000, 6_144_000)
    group.write_text("4:memory:/docker/x\n1:cpu:/\n0::/system.slice/slipstream.service\n")
    service = mount / "system.slice" / "slipstream.service"
    for folder in (service, mount / "memory"):
        folder.mkdir(parents=True)
    (service.parent / "memory.max").write_text("2048000\n")
    (service.parent / "memory.current").write_text("2008000\n")
    assert found() == (2_048_000, 40_000)
    (service / "memory.max").write_text("1024000\n")
    (service / "memory.current").write_text("24000\n")
    assert found() == (1_024_000, 40_000)
    (service / "memory.max").write_text("max\n")
    (service.parent / "memory.max").write_text("max\n")
    assert found() == (8_192_000, 6_144_000)
    (mount / "memory" / "memory.limit_in_bytes").write_text("1024000\n")  # the older version's
    (mount / "memory" / "memory.usage_in_bytes").write_text("24000\n")
    assert found() == (1_024_000, 1_000_000)
    usage, stat = mount / "memory" / "memory.usage_in_bytes", mount / "memory" / "memory.stat"
    usage.write_text("1024000\n")
    stat.write_text("cache 9\ninactive_file 5\ntotal_inactive_file 600000\ntotal_active_file 24000\n")
    assert found() == (1_024_000, 624_000)  # what is cached of files is free to take
    stat.write_text("anon 9\ninactive_file 500000\nactive_file 1000000\n")
    assert found() == (1_024_000, 1_024_000)
    assert memory_bytes(tmp_path / "nothing", [service]) is None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried 5 bytes")])
def test_memory_that_the_system_refuses_is_one_line(error: Exception) -> None:
    settings = load_settings(["--kv-cache-memory", "500GiB"], {})
    line = r"^--kv-cache-memory 500GiB: the system does not give as much memory"
    with pytest.raises(StartRefused, match=line), refused_where_memory_ends(settings):
        raise error
    with pytest.raises(RuntimeError, match="other"), refused_where_memory_ends(settings):
        raise RuntimeError("other")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--gpu-memory-utilization 0.9"),
        (("--kv-cache-memory", "1GiB"), "--kv-cache-memory 1GiB"),
        (("--num-kv-blocks", "9"), "--num-kv-blocks 9"),
    ],
)
def test_memory_that_a_gpu_refuses_is_named_by_what_asked_for_it(flags: tuple[str, ...], named: str) -> None:
    settings = load_settings(flags, {})
    line = f"^{named}: the GPU does not give as much memory"
    with pytest.raises(StartRefused, match=line), refused_where_memory_ends(settings, on_gpu=True):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
