"""How many cores the process may keep busy, on a machine of its own or under a quota.

A limit in time is no limit in cores: a container that may use two cores still sees all sixty-four. As many
threads would spend the quota in a moment and stand still, every stream with them, until the next period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """The cores the process may run on, but no more than its quota of their time is worth; at least 1.

    `groups` lists the process's control groups, `mount` is where the kernel shows their settings.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(groups, mount))]))


def _quotas(groups: Path, mount: Path) -> Iterator[float]:
    """Every quota on the way from the process's group to the root, in cores."""
    for folder in _folders(groups, mount):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
            except (OSError, ValueError):  # another version's files, or "max": no quota
                continue
            if quota > 0 and period > 0:
                yield quota / period


def _folders(groups: Path, mount: Path) -> Iterator[Path]:
    """Where the settings of the process's groups are; inside a container its own are at the root."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = mount / controllers
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
