"""Where and with what a report was measured, and how much of the machine others took meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import psutil
import torch

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """The computer. `num_cpus` are those this process may use, `device` the accelerator's name or "cpu"."""

    cpu: str
    num_cpus: int
    memory_gib: float
    torch_threads: int
    cpu_capability: str
    device: str
    system: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(
            cpu=cpu_model(),
            num_cpus=len(os.sched_getaffinity(0)),
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            torch_threads=torch.get_num_threads(),
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            device=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
            system=f"{platform.system()} {platform.release()}",
        )


@dataclass(frozen=True, slots=True)
class Versions:
    """What was measured and what it ran on."""

    slipstream: str
    python: str
    torch: str
    transformers: str

    @classmethod
    def here(cls) -> Versions:
        """Those installed."""
        return cls(git_describe(), platform.python_version(), torch.__version__, package("transformers"))


def about() -> dict[str, object]:
    """Machine, versions, time and the load average of the last 1, 5 and 15 minutes, as plain data."""
    return {
        "machine": asdict(Machine.here()),
        "versions": asdict(Versions.here()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_describe() -> str:
    """The commit measured, `-dirty` when the tree differs from it; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--tags", "--dirty"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def package(name: str) -> str:
    """An installed package's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class CpuWatch:
    """Counts the CPU time that others take while it is open; children must have ended before it closes."""

    def __init__(self) -> None:
        self.other_percent = 0.0

    def __enter__(self) -> CpuWatch:
        self._started = (time.perf_counter(), machine_cpu_s(), own_cpu_s())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, busy, own = self._started
        seconds = time.perf_counter() - wall
        others = (machine_cpu_s() - busy) - (own_cpu_s() - own)
        self.other_percent = max(0.0, 100 * others / seconds)


def machine_cpu_s() -> float:
    """CPU seconds spent on this machine since it started, time stolen by the host included."""
    times = psutil.cpu_times()
    not_busy = ("idle", "iowait", "guest", "guest_nice")  # guest time is in user time already
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in not_busy))


def own_cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
