"""Seats, tokens of a step and tokens of a block: as given, as on a CPU, as a GPU allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import HunYuanMoEV1Config

from config import load_settings
from engine.compute.drafters.draft_loader import TargetRoom
from engine.errors import StartRefused
from engine.startup.step_sizes import MemoryBeside, ModelNeeds, StepSizes, numbers_of_token, step_sizes
from tests.support.packed import load_tiny
from tests.support.tiny_models import tiny_config

GIB = 1 << 30
# About Llama 3 with 1, 8 and 70 billion parameters in bfloat16, the last one on 4 bits; and a recurrent one.
SMALL = ModelNeeds(2 * GIB, 32 << 10, 0, 80 << 10, 10 * 128256, 131072)
MIDDLE = ModelNeeds(15 * GIB, 128 << 10, 0, 148 << 10, 10 * 128256, 8192)
LARGE = ModelNeeds(40 * GIB, 320 << 10, 0, 296 << 10, 10 * 128256, 8192)
RECURRENT = ModelNeeds(6 * GIB, 0, 256 << 20, 100 << 10, 10 * 65536, 4096)


def sizes_of(needs: ModelNeeds, gpu_gib: int | None, *flags: str) -> StepSizes:
    return step_sizes(load_settings(flags, {}), needs, None if gpu_gib is None else gpu_gib * GIB)


def numbers(sizes: StepSizes) -> tuple[int, int, int]:
    return sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.kv_block_size


@pytest.mark.parametrize("needs", [SMALL, MIDDLE, LARGE, RECURRENT])
def test_a_cpu_has_what_the_documentation_says(needs: ModelNeeds) -> None:
    sizes = sizes_of(needs, None)
    assert numbers(sizes) == (64, 2048, 16)
    assert set(sizes.origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("needs", "gpu_gib", "expected"),
    [
        (SMALL, 8, (128, 2048, 64)),
        (SMALL, 16, (256, 4096, 64)),
        (SMALL, 80, (256, 8192, 64)),
        (MIDDLE, 24, (48, 4096, 64)),
        (MIDDLE, 40, (128, 8192, 64)),
        (MIDDLE, 80, (256, 8192, 64)),
        (LARGE, 80, (64, 8192, 64)),
        (LARGE, 48, (32, 4096, 64)),
        (RECURRENT, 24, (48, 4096, 64)),
        (RECURRENT, 80, (256, 8192, 64)),
        (MIDDLE, 8, (32, 2048, 64)),
    ],
)
def test_a_gpu_has_what_its_memory_allows(
    needs: ModelNeeds, gpu_gib: int, expected: tuple[int, int, int]
) -> None:
    assert numbers(sizes_of(needs, gpu_gib)) == expected


@pytest.mark.parametrize("gpu_gib", [None, 8, 80])
def test_what_is_given_wins(gpu_gib: int | None) -> None:
    flags = ("--max-num-seqs", "7", "--max-num-batched-tokens", "100", "--kv-block-size", "32")
    sizes = sizes_of(MIDDLE, gpu_gib, *flags)
    assert numbers(sizes) == (7, 100, 32)
    assert set(sizes.origins.values()) == {"given"}
    assert sizes_of(MIDDLE, gpu_gib, "--max-num-seqs", "auto") == sizes_of(MIDDLE, gpu_gib)


@pytest.mark.parametrize(("beside_gib", "seats"), [(0, 48), (1, 32), (5, 32)])
def test_weights_beside_the_models_leave_less_for_seats(beside_gib: int, seats: int) -> None:
    sizes = sizes_of(replace(MIDDLE, beside=MemoryBeside(beside_gib * GIB)), 24)
    assert numbers(sizes) == (seats, 4096, 64), "what steps are computed in stays"


def test_weights_beside_the_models_count_as_its_own_do() -> None:
    for gib in (2, 7, 20, 60):
        with_others = replace(MIDDLE, weights=MIDDLE.weights - GIB, beside=MemoryBeside(gib * GIB, GIB))
        alone = replace(MIDDLE, weights=MIDDLE.weights + gib * GIB)
        assert sizes_of(with_others, 80) == sizes_of(alone, 80)
    held = sizes_of(replace(MIDDLE, beside=MemoryBeside(20 * GIB)), 80).origins["max_num_seqs"]
    assert held == "derived: 80.00 GiB of GPU memory, K/V for 287 sequences of 1,024 tokens"


def test_memory_that_is_given_for_k_v_is_not_theirs() -> None:
    given = ("--kv-cache-memory", "16GiB")
    beside = MemoryBeside(40 * GIB, kept=(lambda room: 12 * GIB,))
    assert sizes_of(replace(MIDDLE, beside=beside), 80, *given) == sizes_of(MIDDLE, 80, *given)


# Of 80 GiB 8,192 tokens of a step take 1.16; of nine tenths of the rest weights take 15 GiB. 447 sequences of
# 1,024 tokens fit in the 55.96 GiB that are left, 128 MiB each.
@pytest.mark.parametrize(
    ("kept", "seats", "held"),
    [
        (lambda room: 0, 256, 447),
        (lambda room: room.kv_bytes // 4, 256, 335),
        (lambda room: room.kv_bytes // 2, 192, 223),
        (lambda room: room.max_num_seqs * 96 << 20, 192, 303),  # 256 seats would leave room for 255
        (lambda room: 24 * GIB, 192, 255),
        (lambda room: 60 * GIB, 32, 0),
    ],
)
def test_what_drafters_keep_of_as_many_sequences_leaves_less_for_seats(
    kept: Callable[[TargetRoom], int], seats: int, held: int
) -> None:
    sizes = sizes_of(replace(MIDDLE, beside=MemoryBeside(kept=(kept,))), 80)
    assert numbers(sizes) == (seats, 8192, 64)
    assert sizes.origins["max_num_seqs"].endswith(f" K/V for {held} sequences of 1,024 tokens")


def test_drafters_are_asked_about_k_v_without_the_states_of_all_seats() -> None:
    asked: list[TargetRoom] = []

    def keep(room: TargetRoom) -> int:
        asked.append(room)
        return 0

    beside = MemoryBeside(kept=(keep,))
    sizes_of(replace(RECURRENT, beside=beside), 80)
    work = 8192 * (100 << 10)
    whole = int((80 * GIB - work) * 0.9) - 6 * GIB
    assert asked[0] == TargetRoom(256, 64, whole - 256 * (256 << 20))


def test_each_derived_size_says_why() -> None:
    origins = sizes_of(MIDDLE, 24, "--kv-block-size", "16").origins
    assert origins == {
        "max_num_seqs": "derived: 24.00 GiB of GPU memory, K/V for 48 sequences of 1,024 tokens",
        "max_num_batched_tokens": "derived: 24.00 GiB of GPU memory, 592 MiB to compute in",
        "kv_block_size": "given",
    }


def test_memory_that_is_given_for_k_v_counts_in_place_of_the_gpus() -> None:
    assert sizes_of(MIDDLE, 80, "--kv-cache-memory", "16GiB").max_num_seqs == 128
    blocks = ("--num-kv-blocks", str(100 * 1024 // 64))
    assert sizes_of(MIDDLE, 80, *blocks).max_num_seqs == 96, "100 sequences of 1,024 tokens"


def test_a_short_context_makes_more_seats() -> None:
    assert sizes_of(MIDDLE, 24).max_num_seqs == 48
    assert sizes_of(replace(MIDDLE, max_model_len=512), 24).max_num_seqs == 96


def test_a_larger_step_leaves_less_for_seats() -> None:
    assert sizes_of(MIDDLE, 24, "--max-num-batched-tokens", "16384").max_num_seqs == 32


@pytest.mark.parametrize(
    ("vocab_size", "width", "flags", "rows"),
    [
        (49_152, 2, (), 5461),  # more than 64 seats with 32 drafts want
        (49_152, 4, (), 2730),
        (128_256, 2, (), 2092),
        (262_144, 2, (), 1024),
        (262_144, 4, (), 512),
        (128_256, 2, ("--max-num-seqs", "1"), 2092),
        (128_256, 2, ("--max-num-seqs", "2000"), 4000),
        (262_144, 4, ("--max-num-seqs", "257"), 514),
    ],
)
@pytest.mark.parametrize("gpu_gib", [None, 80])
def test_rows_of_logits_are_as_many_as_512_mib_hold_but_two_a_seat(
    vocab_size: int, width: int, flags: tuple[str, ...], rows: int, gpu_gib: int | None
) -> None:
    needs = replace(MIDDLE, given_of_row=vocab_size * width)
    assert sizes_of(needs, gpu_gib, *flags).max_logits_rows == rows


def test_a_part_of_a_step_is_not_larger_than_what_is_derived() -> None:
    with pytest.raises(StartRefused, match=r"^--max-decode-seqs 65: at most --max-num-seqs, here 64\."):
        sizes_of(MIDDLE, None, "--max-decode-seqs", "65")
    assert sizes_of(MIDDLE, 80, "--max-decode-seqs", "65").max_num_seqs == 256
    wrong = r"^--max-prefill-tokens 9000: at most --max-num-batched-tokens, here 8192\."
    with pytest.raises(StartRefused, match=wrong):
        sizes_of(MIDDLE, 80, "--max-prefill-tokens", "9000")


def test_needs_are_those_of_the_model() -> None:
    loaded = load_tiny("llama")
    needs = ModelNeeds.of(load_settings((), {}), loaded)
    assert needs.weights >= sum(each.numel() * each.itemsize for each in loaded.model.parameters())
    first = loaded.layers[0]
    assert needs.kv_of_token == len(loaded.layers) * 2 * first.num_kv_heads * first.key_dim * 4
    assert needs.state_of_seq == needs.beside.total == 0
    assert ModelNeeds.of(load_settings((), {}), loaded, MemoryBeside(77)) == replace(
        needs, beside=MemoryBeside(77)
    )
    config = loaded.config
    assert needs.work_of_token == 4 * (8 * config.hidden_size + 3 * config.intermediate_size)
    assert needs.work(StepSizes(3, 10, 16, 10)) == 10 * needs.work_of_token + 3 * 12 * loaded.vocab_size


def test_of_sizes_that_each_layer_has_for_itself_the_largest_counts() -> None:
    """Gemma 3n and Hunyuan list them."""
    config = tiny_config("gemma3n", intermediate_size=[128, 256, 64, 128])
    assert numbers_of_token(config) == 8 * 64 + 3 * 256
    mixture = HunYuanMoEV1Config(hidden_size=64, intermediate_size=96, moe_topk=[2, 3])
    mixture.moe_intermediate_size = [48, 32]
    assert numbers_of_token(mixture) == 8 * 64 + 3 * 3 * 48
