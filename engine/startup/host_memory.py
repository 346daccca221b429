"""How much memory the process may have, and whether what a start needs can be had at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from config.units import rough_size
from engine.startup.cpu_limit import group_folders
from engine.startup.diagnosis import Diagnosis

_MEMINFO = Path("/proc/meminfo")
# The files of a control group with its limit and what is used of it, of both versions.
_LIMITS: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def memory_bytes(meminfo: Path = _MEMINFO, folders: Iterable[Path] | None = None) -> tuple[int, int] | None:
    """All memory that this process may use and what of it is free to take; None where that is not known.

    A limit of one of its control groups, a container's or a service's, counts where it is lower than the
    machine's. `folders` are where the kernel shows them, None for this process's own.
    """
    fields = _read_fields(meminfo)
    if fields is None:
        return None
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for folder in group_folders("memory") if folders is None else folders:
        for names in _LIMITS:
            limit, used = (_read_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < fields["MemTotal"]:
                left = limit - used + _cached_bytes(folder / "memory.stat")
                total, available = min(total, limit), min(available, min(limit, max(0, left)))
    return total, available


def weigh(found: Diagnosis, memory: tuple[int, int] | None) -> None:
    """Note in `found` what it needs more of than there is: a problem beyond all there is, else a warning.

    `memory` is the host's, total and available; None is not known.
    """
    device, needed = found.device, found.needed_bytes
    is_cuda = device is not None and device.device.startswith("cuda")
    if is_cuda and memory is not None:
        _weigh_beside_gpu(found, memory[1])
    if is_cuda and device is not None and device.free_bytes is not None:
        memory = device.free_bytes, device.free_bytes  # nothing takes more of a GPU than is free
    if memory is None or needed is None or found.cache is None:
        return
    total, available = memory
    place = "the GPU has free" if is_cuda else "this machine has"
    flag = found.cache.source
    if needed > total:
        found.problems.append(
            f"Model and K/V take {rough_size(needed)}, {place} {rough_size(total)} of memory: lower {flag}."
        )
    elif needed > available:
        found.warnings.append(
            f"Model and K/V take {rough_size(needed)}, {rough_size(available)} of memory are available: "
            f"lower {flag}, or free some."
        )
    elif is_cuda and needed + found.work_bytes > total:
        found.warnings.append(
            f"Model and K/V take {rough_size(needed)} and leave too little of what {place}, "
            f"{rough_size(total)}: steps take about {rough_size(found.work_bytes)} more. Lower {flag}."
        )


def _weigh_beside_gpu(found: Diagnosis, available: int) -> None:
    """Warn where a GPU's server may take more of the host than is available.

    What requests are swapped to is pinned: the system can take none of it back, and ends processes instead.
    """
    swapped = 0 if found.cache is None else found.cache.host_bytes
    drafts = found.drafts
    drafting = (drafts.model_bytes or 0) + (drafts.model_kv_bytes or 0) if drafts and drafts.is_on_host else 0
    if swapped + drafting > available:
        beside = f" beside {rough_size(drafting)} of the draft model" if drafting else ""
        found.warnings.append(
            f"Preempted requests may take {rough_size(swapped)} of host memory{beside}, "
            f"{rough_size(available)} are available: lower --swap-space, or free some."
        )


def _read_fields(path: Path) -> dict[str, int] | None:
    """The sizes that the kernel lists, in bytes; None unless those that count are there."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        fields = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    except (OSError, ValueError, LookupError):
        return None
    return fields if {"MemTotal", "MemAvailable"} <= fields.keys() else None


def _cached_bytes(path: Path) -> int:
    """What of a group's memory holds parts of files, which the kernel gives away when it is asked for."""
    try:
        found = dict(line.split(maxsplit=1) for line in path.read_text(encoding="ascii").splitlines())
        # With "total_" in the older version, where the plain names leave out the groups below.
        return sum(
            int(found.get(f"total_{name}", found.get(name, 0))) for name in ("inactive_file", "active_file")
        )
    except (OSError, ValueError):
        return 0


def _read_number(path: Path) -> int | None:
    """The number in a file of the kernel's; None without the file, or for the word max."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
