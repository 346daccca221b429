"""How many K/V blocks the settings ask for."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import load_settings
from engine.compute.recurrent.slot_states import LayerState
from engine.errors import StartRefused
from engine.startup.build import (
    HostRoom,
    count_host_room,
    count_kv_blocks,
    count_snapshots,
    seat_states_bytes,
    use_compute_threads,
)

BLOCK_BYTES = 4096


STATE = LayerState(layer_idx=0, row_width=0, conv_width=0, shape=(256,))  # 1 KiB a seat


def model_on(device: str, states: tuple[LayerState, ...] = ()) -> Any:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), max_model_len=64, states=states, dtype=torch.float32
    )


def count(
    device: str, *flags: str, block_bytes: int = BLOCK_BYTES, states: tuple[LayerState, ...] = ()
) -> int:
    return count_kv_blocks(load_settings(flags, {}), model_on(device, states), block_bytes)


def snapshots(*flags: str, states: tuple[LayerState, ...] = (STATE,)) -> int:
    return count_snapshots(load_settings(flags, {}), model_on("cpu", states), BLOCK_BYTES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_was_asked_for_counts_on_every_device(device: str) -> None:
    assert count(device, "--kv-cache-memory", "1MiB") == 256
    assert count(device, "--num-kv-blocks", "7", "--kv-cache-memory", "1MiB") == 7


def test_a_cpu_takes_the_default_memory() -> None:
    assert count("cpu") == 2**30 // BLOCK_BYTES


def test_too_little_for_one_sequence_is_refused_with_the_flag() -> None:
    with pytest.raises(StartRefused, match=r"needs 4 blocks .*--kv-cache-memory 8192 gives 2"):
        count("cuda", "--kv-cache-memory", "8KiB")


def test_recurrent_states_come_out_of_the_same_memory() -> None:
    one_mib = ("--kv-cache-memory", "1MiB")
    assert count("cpu", *one_mib, "--no-prefix-caching", states=(STATE,)) == 256 - 16, "64 seats of 1 KiB"
    assert count("cpu", *one_mib, states=(STATE,)) == (256 - 16) * 7 // 8, "and an eighth for snapshots"
    with pytest.raises(StartRefused, match=r"max-num-seqs 64 take 65536 bytes .*gives 65536"):
        count("cpu", "--kv-cache-memory", "64KiB", states=(STATE,))


@pytest.mark.parametrize(
    ("flags", "num_kept"), [(("--num-speculative-tokens", "5"), 5), (("--speculative-method", "none"), 1)]
)
def test_seats_keep_the_rows_of_drafts_or_of_a_last_token_before_which_forks_begin(
    flags: tuple[str, ...], num_kept: int
) -> None:
    state = LayerState(layer_idx=0, row_width=8, conv_width=3, shape=(256,))
    settings = load_settings((*flags, "--max-num-seqs", "2"), {})
    seats_bytes = seat_states_bytes(settings, model_on("cpu", (state,)))
    assert seats_bytes == 2 * (8 * (3 + num_kept) * 4 + 1024)


def test_snapshots_get_an_eighth_of_what_is_left_but_not_what_one_sequence_needs() -> None:
    assert snapshots("--kv-cache-memory", "1MiB") == (1024 - 64) // 8
    assert snapshots("--kv-cache-memory", "82KiB") == 2, "64 KiB for seats, 16 for a sequence"
    assert snapshots("--kv-cache-memory", "80KiB") == snapshots("--kv-cache-memory", "64KiB") == 0
    assert snapshots("--kv-cache-memory", "1GiB") == 1024
    assert snapshots("--no-prefix-caching") == snapshots(states=()) == 0


def test_a_model_that_attends_nowhere_has_blocks_for_every_seat() -> None:
    assert count("cpu", block_bytes=0, states=(STATE,)) == 64 * 4
    assert count("cpu", "--num-kv-blocks", "9", block_bytes=0, states=(STATE,)) == 9


def host_room(*flags: str, block_bytes: int = BLOCK_BYTES, keeps_state: bool = True) -> HostRoom:
    model = model_on("cpu", (STATE,) if keeps_state else ())
    model.keeps_state = keeps_state
    return count_host_room(load_settings(("--preemption", "swap", *flags), {}), model, block_bytes)


def test_states_get_half_of_the_swap_space_and_blocks_the_rest() -> None:
    assert host_room("--swap-space", "1MiB") == HostRoom(128, 512, 2**20, 1024)
    assert host_room("--swap-space", "9KiB") == HostRoom(1, 4, 8192, 1024)
    assert host_room("--swap-space", "1KiB") == HostRoom(0, 0, 0, 1024), "half of it is too small for one"
    assert host_room("--swap-space", "1MiB", keeps_state=False) == HostRoom(256, num_bytes=2**20)


def test_a_model_that_attends_nowhere_swaps_states_alone() -> None:
    room = host_room("--swap-space", "8KiB", block_bytes=0)
    assert room == HostRoom(8 * 4, 8, 8192, 1024), "and blocks for each, which take nothing"
    assert host_room("--swap-space", "0", block_bytes=0) == HostRoom(state_bytes=1024)


def test_nothing_is_kept_on_the_host_where_nothing_is_swapped() -> None:
    assert host_room("--preemption", "recompute") == HostRoom()


def test_compute_threads_take_what_is_too_small_for_zero() -> None:
    """All of them, those that torch begins for a large tensor, too."""

    def smallest() -> float:
        use_compute_threads()
        return float((torch.full((1 << 22,), 2e-38) * 0.1).max())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(smallest).result() == 0.0
