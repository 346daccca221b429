"""The computer this process runs on, and what is installed: for reports. Standard library only."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, object]:
    """The computer as plain data."""
    return {
        "cpu": cpu_model(),
        "num_cpus": num_cpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def versions(*names: str) -> dict[str, str]:
    """Of Python and of the distributions of those names."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in names}}


def package_version(name: str) -> str:
    """An installed distribution's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def num_cpus() -> int:
    """How many cores this process may run on; a quota of their time not counted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
