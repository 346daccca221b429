"""How many K/V blocks the settings ask for."""

from types import SimpleNamespace
from typing import Any

import pytest

from config import load_settings
from engine.build import count_kv_blocks
from engine.errors import StartRefused

BLOCK_BYTES = 4096


def count(device: str, *flags: str) -> int:
    loaded: Any = SimpleNamespace(device=SimpleNamespace(type=device), max_model_len=64)
    return count_kv_blocks(load_settings(flags, {}), loaded, BLOCK_BYTES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_was_asked_for_counts_on_every_device(device: str) -> None:
    assert count(device, "--kv-cache-memory", "1MiB") == 256
    assert count(device, "--num-kv-blocks", "7", "--kv-cache-memory", "1MiB") == 7


def test_a_cpu_takes_the_default_memory() -> None:
    assert count("cpu") == 2**30 // BLOCK_BYTES


def test_too_little_for_one_sequence_is_refused_with_the_flag() -> None:
    with pytest.raises(StartRefused, match=r"needs 4 blocks .*--kv-cache-memory 8192 gives 2"):
        count("cuda", "--kv-cache-memory", "8KiB")
