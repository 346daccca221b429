"""Machines with several memory nodes (NUMA): memory lies on all whose cores compute, page by page in turns.

The system puts a page on the node of the thread that first writes it. One thread loads the weights, so all of
them would lie on one node, and the cores of the others would read every weight of every pass through the link
between them. Binding each thread's share of the weights to its node would be faster still, but work is handed
to whichever thread is free.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
# (get_mempolicy, set_mempolicy): glibc has no functions of these names.
_SYSTEM_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_DEFAULT, _INTERLEAVE = 0, 3  # linux/mempolicy.h
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def memory_nodes(processors: set[int], nodes: Path = _NODES) -> tuple[int, ...]:
    """The nodes that some of `processors` belong to; none where the system does not show them.

    `nodes` is where the kernel shows which processors are whose.
    """
    numbers = (int(folder.name.removeprefix("node")) for folder in nodes.glob("node[0-9]*"))
    return tuple(sorted(node for node in numbers if not processors.isdisjoint(_processors(nodes, node))))


def spread_memory(nodes: Sequence[int]) -> bool:
    """Have what the calling thread and threads that it begins write first lie on `nodes` in turns.

    False where that cannot be had, and nothing is changed: another system, a container that forbids the
    call, or a policy that the process was given already, by numactl for one.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return False
    get_policy, set_policy = numbers
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    policy = ctypes.c_int()
    if system_call(get_policy, ctypes.byref(policy), None, 0, None, 0) != 0 or policy.value != _DEFAULT:
        return False
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel takes one bit less than it is told of.
    return bool(system_call(set_policy, _INTERLEAVE, words, len(words) * _WORD_BITS + 1) == 0)


def usable_nodes() -> tuple[int, ...]:
    """The nodes of the processors that this process may run on."""
    return memory_nodes(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


def _processors(nodes: Path, node: int) -> Iterator[int]:
    """Those of a node, from a list such as `0-3,8-11`."""
    try:
        ranges = (nodes / f"node{node}/cpulist").read_text().strip().split(",")
    except OSError:
        return
    for each in filter(None, ranges):
        first, _, last = each.partition("-")
        yield from range(int(first), int(last or first) + 1)
