"""Where and with what a report was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, object]:
    """The client's computer as plain data."""
    return {
        "cpu": cpu_model(),
        "num_cpus": num_cpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """What measured."""
    names = ("slipstream", "httptools", "uvloop")
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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
