"""How many cores the process may keep busy, on a machine of its own or under a quota.

A limit in time is no limit in cores: a container that may use two cores still sees all sixty-four. As many
threads would spend the quota in a moment and stand still, every stream with them, until the next period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_PROCESSORS = Path("/sys/devices/system/cpu")
_MANY_CORES = 4


def usable_cores(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """The cores the process may run on, but no more than its quota of their time is worth; at least 1.

    `groups` lists the process's control groups, `mount` is where the kernel shows their settings.
    """
    return max(1, min([len(_processors()), *map(int, _quotas(groups, mount))]))


def whole_cores(processors: Path = _PROCESSORS) -> int:
    """The cores that the process may run on, two processors that share one counted once; at least 1.

    `processors` is where the kernel shows which share one; those it does not show count one each.
    """
    siblings = set()
    for number in _processors():
        try:
            siblings.add((processors / f"cpu{number}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            siblings.add(str(number))
    return max(1, len(siblings))


def thread_counts(usable: int, whole: int) -> tuple[int, ...]:
    """How many compute threads are worth a try, what is likely best first.

    All that may be used; one for each whole core, whose second half adds little to products of matrices and
    takes from its cache; and one less than all, which leaves a core to what else runs. One of few cores is
    too much to give away for what may be a busy moment, and a start cannot tell.
    """
    spared = usable - 1 if usable >= _MANY_CORES else usable
    return tuple(dict.fromkeys((usable, min(usable, whole), spared)))


def _processors() -> list[int]:
    """The numbers of the processors that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quotas(groups: Path, mount: Path) -> Iterator[float]:
    """Every quota on the way from the process's group to the root, in cores."""
    for folder in group_folders("cpu", groups, mount):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
            except (OSError, ValueError):  # another version's files, or "max": no quota
                continue
            if quota > 0 and period > 0:
                yield quota / period


def group_folders(controller: str, groups: Path = _GROUPS, mount: Path = _MOUNT) -> Iterator[Path]:
    """Where the settings of the process's groups are; inside a container its own are at the root."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = mount / controllers
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
