"""How much memory K/V gets, and how many blocks, snapshots and swapped requests it holds."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import load_settings
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.draft_loader import TargetRoom
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.slot_states import LayerState
from engine.compute.runner.largest_step import LargestStep
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused
from engine.startup.build_runner import recorded_bytes
from engine.startup.kv_room import HostRoom, KvRoom, find_kv_memory, foresee_kv_room, measure_kv_room
from engine.startup.step_sizes import MemoryBeside, ModelNeeds, StepSizes, step_sizes
from tests.support.packed import load_tiny
from tests.support.recurrent import load_recurrent

BLOCK_BYTES = 4096  # 16 tokens of one layer with a head of 32 numbers, in 32 bits
STATE = LayerState(layer_idx=0, row_width=0, conv_width=0, shape=(256,))  # 1 KiB a seat
SIZES = StepSizes(64, 2048, 16, 2048)
GIB = 1 << 30


@dataclass
class FakeGauge:
    """A device of 80 GiB, 60 of them free, whose steps take what `peaks` say, one after the other."""

    peaks: list[int] = field(default_factory=list)
    free: int = 60 * GIB
    total: int = 80 * GIB

    def free_and_total(self) -> tuple[int, int]:
        return self.free, self.total

    def peak(self, work: Callable[[], None]) -> int:
        work()
        return self.peaks.pop(0)


def model_on(device: str, states: tuple[LayerState, ...] = (), has_layers: bool = True) -> Any:
    return SimpleNamespace(
        model=torch.nn.Module(),
        device=torch.device(device),
        max_model_len=64,
        vocab_size=1000,
        states=states,
        keeps_state=bool(states),
        layers=(LayerKv(1, 32, 32),) if has_layers else (),
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )


def room_for(model: Any, *flags: str) -> KvRoom:
    settings = load_settings(flags, {})
    sizes = replace(SIZES, max_num_seqs=settings.scheduler.max_num_seqs or SIZES.max_num_seqs)
    gauge = FakeGauge() if model.device.type == "cuda" else None
    return KvRoom(settings, model, sizes, find_kv_memory(settings, model, sizes, gauge, 0))


def count(device: str, *flags: str, has_layers: bool = True, states: tuple[LayerState, ...] = ()) -> int:
    return room_for(model_on(device, states, has_layers), *flags).count_blocks()


def snapshots(*flags: str, states: tuple[LayerState, ...] = (STATE,)) -> int:
    return room_for(model_on("cpu", states), *flags).count_snapshots()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_was_asked_for_counts_on_every_device(device: str) -> None:
    assert count(device, "--kv-cache-memory", "1MiB") == 256
    assert count(device, "--num-kv-blocks", "7", "--kv-cache-memory", "1MiB") == 7


def test_a_cpu_takes_the_default_memory() -> None:
    assert count("cpu") == 2**30 // BLOCK_BYTES


def test_too_little_for_one_sequence_is_refused_with_the_flag() -> None:
    with pytest.raises(StartRefused, match=r"needs 4 blocks .*--kv-cache-memory 8192 gives 2\. .*-len\.$"):
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
    seats_bytes = room_for(model_on("cpu", (state,)), *flags, "--max-num-seqs", "2").seats_bytes
    assert seats_bytes == 2 * (8 * (3 + num_kept) * 4 + 1024)


def test_snapshots_get_an_eighth_of_what_is_left_but_not_what_one_sequence_needs() -> None:
    assert snapshots("--kv-cache-memory", "1MiB") == (1024 - 64) // 8
    assert snapshots("--kv-cache-memory", "82KiB") == 2, "64 KiB for seats, 16 for a sequence"
    assert snapshots("--kv-cache-memory", "80KiB") == snapshots("--kv-cache-memory", "64KiB") == 0
    assert snapshots("--kv-cache-memory", "1GiB") == 1024
    assert snapshots("--no-prefix-caching") == snapshots(states=()) == 0


def test_a_model_that_attends_nowhere_has_blocks_for_every_seat() -> None:
    assert count("cpu", has_layers=False, states=(STATE,)) == 64 * 4
    assert count("cpu", "--num-kv-blocks", "9", has_layers=False, states=(STATE,)) == 9


def host_room(*flags: str, has_layers: bool = True, keeps_state: bool = True) -> HostRoom:
    model = model_on("cpu", (STATE,) if keeps_state else (), has_layers)
    return room_for(model, "--preemption", "swap", *flags).count_host_room()


def test_states_get_half_of_the_swap_space_and_blocks_the_rest() -> None:
    assert host_room("--swap-space", "1MiB") == HostRoom(128, 512, 2**20, 1024)
    assert host_room("--swap-space", "9KiB") == HostRoom(1, 4, 8192, 1024)
    assert host_room("--swap-space", "1KiB") == HostRoom(0, 0, 0, 1024), "half of it is too small for one"
    assert host_room("--swap-space", "1MiB", keeps_state=False) == HostRoom(256, num_bytes=2**20)


def test_a_model_that_attends_nowhere_swaps_states_alone() -> None:
    room = host_room("--swap-space", "8KiB", has_layers=False)
    assert room == HostRoom(8 * 4, 8, 8192, 1024), "and blocks for each, which take nothing"
    assert host_room("--swap-space", "0", has_layers=False) == HostRoom(state_bytes=1024)


def test_nothing_is_kept_on_the_host_where_nothing_is_swapped() -> None:
    assert host_room("--preemption", "recompute") == HostRoom()


def on_gpu(*flags: str, work: int = 0, weights: int = 0) -> int:
    settings = load_settings(flags, {})
    return find_kv_memory(settings, model_on("cuda"), SIZES, FakeGauge(), work, weights).num_bytes


def test_a_gpu_gives_k_v_its_share_less_what_is_there_and_what_steps_take() -> None:
    recorded = recorded_bytes(load_settings((), {}), model_on("cuda"), SIZES)
    assert recorded > 0
    left = 72 * GIB - 20 * GIB - recorded
    assert on_gpu() == left
    assert on_gpu(work=3 * GIB) == left - 3 * GIB
    assert on_gpu(work=3 * GIB, weights=16 * GIB) == left - 19 * GIB
    assert on_gpu("--gpu-memory-utilization", "0.5") == 20 * GIB - recorded
    assert on_gpu(work=100 * GIB) == 0, "not less than nothing"
    assert on_gpu("--kv-cache-memory", "1MiB", work=3 * GIB) == 1 << 20, "what is given is given"


def test_what_is_recorded_follows_the_seats() -> None:
    few, many = (
        recorded_bytes(load_settings((), {}), model_on("cuda"), replace(SIZES, max_num_seqs=seats))
        for seats in (32, 256)
    )
    assert few < many


def test_the_largest_of_the_measured_steps_counts() -> None:
    loaded = load_tiny("llama")
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    cases: list[tuple[list[int], tuple[str, ...]]] = [
        ([5 * GIB, 2 * GIB], ()),
        ([2 * GIB, 5 * GIB], ()),
        ([1 * GIB, 5 * GIB], ("--speculative-method", "none")),
    ]
    for peaks, more in cases:
        gauge = FakeGauge(peaks)
        room = measure_kv_room(load_settings((*flags, *more), {}), loaded, sampler, gauge)
        assert room.memory == (72 * GIB - 20 * GIB - 5 * GIB, "--gpu-memory-utilization 0.9")
        assert gauge.peaks == []


def test_rows_of_drafts_are_measured_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[LargestStep] = []

    def measure(_loaded: Any, _sampler: Any, largest: LargestStep, _gauge: Any) -> int:
        measured.append(largest)
        return 0

    monkeypatch.setattr("engine.startup.kv_room.measure_largest_step", measure)
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    sizes = StepSizes(4, 64, 16, 20)
    for flags in ((), ("--num-speculative-tokens", "2"), ("--speculative-method", "none")):
        measure_kv_room(load_settings(flags, {}), loaded, sampler, FakeGauge(), sizes)
    measure_kv_room(load_settings((), {}), loaded, sampler, FakeGauge(), replace(sizes, max_logits_rows=512))
    assert measured == [LargestStep(64, 4, 16, num_rows) for num_rows in (20, 12, 4, 64)]


@dataclass
class ScarceGauge(FakeGauge):
    """Has no memory for the first steps, as many as `num_failures`."""

    num_failures: int = 0

    def peak(self, work: Callable[[], None]) -> int:
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().peak(work)


def test_steps_that_find_no_memory_get_smaller_as_far_as_nobody_asked_for_them() -> None:
    loaded, settings = load_tiny("llama"), load_settings(("--max-num-seqs", "4"), {})
    sampler = Sampler(loaded.vocab_size, loaded.device)
    room = measure_kv_room(settings, loaded, sampler, ScarceGauge([GIB] * 2, num_failures=2))
    assert room.sizes.max_num_batched_tokens == 2048
    expected = "derived: 4096 find no memory to be computed in"
    assert room.sizes.origins["max_num_batched_tokens"] == expected
    with pytest.raises(StartRefused, match=r"--max-num-batched-tokens 2048 or --max-num-seqs 4 "):
        measure_kv_room(settings, loaded, sampler, ScarceGauge(num_failures=3))
    given = load_settings(("--max-num-batched-tokens", "8192"), {})
    with pytest.raises(StartRefused, match=r"--max-num-batched-tokens 8192 or "):
        measure_kv_room(given, loaded, sampler, ScarceGauge(num_failures=1))


def test_nothing_is_measured_where_the_memory_is_given() -> None:
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    settings = load_settings(("--kv-cache-memory", "1MiB"), {})
    assert measure_kv_room(settings, loaded, sampler, FakeGauge()).memory.num_bytes == 1 << 20
    assert measure_kv_room(load_settings((), {}), loaded, sampler, None).memory.num_bytes == GIB


def test_before_weights_are_loaded_they_and_the_work_of_a_step_are_foreseen() -> None:
    loaded, settings = load_tiny("llama"), load_settings((), {})
    needs = ModelNeeds.of(settings, loaded)
    before, after = (
        foresee_kv_room(settings, loaded, FakeGauge(), is_loaded=is_loaded) for is_loaded in (False, True)
    )
    assert after.memory.num_bytes == 72 * GIB - 20 * GIB - needs.work(after.sizes)
    assert before.memory.num_bytes == after.memory.num_bytes - needs.weights


def test_logits_of_drafts_are_foreseen_where_they_take_more_than_the_layers() -> None:
    """256 seats of Llama 8B with 32 drafts each want 8,448 rows of 128,256 numbers in 16 bits."""
    needs = ModelNeeds(0, 0, 0, work_of_token=151_552, logits_of_row=1_282_560, max_model_len=1 << 17)
    sizes = StepSizes(256, 8192, 64, 8192)
    assert needs.work(sizes) == 8192 * 151_552 + 256 * 1_282_560
    many = replace(needs, given_of_row=256_512, most_drafts=32)
    assert many.work(sizes) == 8192 * 256_512 + 256 * 1_282_560
    assert replace(many, most_drafts=3).work(sizes) == needs.work(sizes), "of 1,024 rows"
    limited = replace(sizes, max_logits_rows=6000)
    assert many.work(limited) == 6000 * 256_512 + 256 * 1_282_560
    limited = step_sizes(load_settings((), {}), many, 80 * GIB)
    assert (limited.max_num_seqs, limited.max_logits_rows) == (256, 2092)
    assert many.work(limited) == needs.work(sizes), "the layers take more than 512 MiB"
    loaded, settings = load_tiny("llama"), load_settings(("--num-speculative-tokens", "5"), {})
    found = ModelNeeds.of(settings, loaded)
    assert (found.given_of_row, found.most_drafts) == (loaded.vocab_size * 4, 5)


def test_weights_beside_the_models_are_foreseen_whether_its_own_are_there_or_not() -> None:
    loaded, settings = load_tiny("llama"), load_settings((), {})
    beside = MemoryBeside(3 * GIB, GIB)
    for is_loaded in (False, True):
        plain = foresee_kv_room(settings, loaded, FakeGauge(), is_loaded=is_loaded)
        less = foresee_kv_room(settings, loaded, FakeGauge(), beside, is_loaded=is_loaded)
        assert less.memory.num_bytes == plain.memory.num_bytes - 4 * GIB
    on_cpu = foresee_kv_room(settings, loaded, None, beside)
    assert on_cpu == foresee_kv_room(settings, loaded, None), "whose memory is given"


def test_what_drafters_will_keep_is_told_by_the_room_without_them_and_taken_from_it() -> None:
    loaded, settings = load_tiny("llama"), load_settings(("--max-num-seqs", "4"), {})
    beside = MemoryBeside(kept=(lambda room: room.kv_bytes // 4, lambda room: room.max_num_seqs * GIB))
    plain = foresee_kv_room(settings, loaded, FakeGauge())
    room = foresee_kv_room(settings, loaded, FakeGauge(), beside)
    whole = TargetRoom(4, 64, plain.count_blocks() * plain.block_bytes)
    assert room.memory == plain.memory and room.for_drafters == plain.for_drafters == whole
    assert room.drafts == whole.kv_bytes // 4 + 4 * GIB
    assert room.count_blocks() == (plain.memory.num_bytes - room.drafts) // plain.block_bytes
    for given in (("--kv-cache-memory", "1GiB"), ("--num-kv-blocks", "64")):
        settings = load_settings((*given, "--max-num-seqs", "4"), {})
        room = foresee_kv_room(settings, loaded, FakeGauge(), beside)
        assert room == foresee_kv_room(settings, loaded, FakeGauge()), "which is the model's alone"


def test_k_v_that_drafters_leave_no_room_for_is_refused() -> None:
    loaded, settings = load_tiny("llama"), load_settings((), {})
    beside = MemoryBeside(kept=(lambda room: 100 * GIB,))
    room = foresee_kv_room(settings, loaded, FakeGauge(), beside)
    with pytest.raises(StartRefused, match=r"0\.9 gives 0\. Raise it, or lower .*-len or --max-num-seqs\.$"):
        room.count_blocks()


def test_what_is_loaded_later_keeps_its_room_once_work_is_measured() -> None:
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    settings = load_settings(("--max-num-seqs", "4", "--max-num-batched-tokens", "32"), {})
    plain, less = (
        measure_kv_room(settings, loaded, sampler, FakeGauge([GIB] * 2), coming=partial(mul, coming))
        for coming in (0, 5 * GIB // 4)
    )
    assert plain.memory.num_bytes - less.memory.num_bytes == 5 * GIB
    given = load_settings(("--kv-cache-memory", "1MiB"), {})
    assert (
        measure_kv_room(given, loaded, sampler, FakeGauge(), coming=lambda _: GIB).memory.num_bytes == 1 << 20
    )


def test_what_sequences_will_hold_is_told_by_the_seats_that_there_are_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.startup.kv_room.measure_largest_step", lambda *_: 0)
    loaded, settings = recurrent_with(3 * GIB), load_settings((), {})
    sampler = Sampler(loaded.vocab_size, loaded.device)
    foreseen = replace(foresee_kv_room(settings, loaded, FakeGauge()).sizes, max_num_seqs=32)
    plain = measure_kv_room(settings, loaded, sampler, FakeGauge(), foreseen)
    room = measure_kv_room(settings, loaded, sampler, FakeGauge(), foreseen, lambda seats: seats << 20)
    assert plain.sizes.max_num_seqs == room.sizes.max_num_seqs == 16
    assert plain.memory.num_bytes - room.memory.num_bytes == 16 << 20


def test_sizes_that_drafters_were_made_by_stay() -> None:
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    sizes = StepSizes(3, 32, 8, 32)
    room = measure_kv_room(load_settings((), {}), loaded, sampler, FakeGauge([0] * 2), sizes)
    assert room.sizes is sizes


def recurrent_with(seat_bytes: int) -> LoadedModel:
    state = LayerState(layer_idx=0, row_width=0, conv_width=0, shape=(seat_bytes // 4,))
    return replace(load_recurrent("mamba2"), states=(state,))


@pytest.mark.parametrize(("seat_bytes", "seats"), [(150 << 20, 256), (208 << 20, 192), (3 * GIB, 16)])
def test_seats_are_as_many_as_there_is_memory_for_the_states_of(seat_bytes: int, seats: int) -> None:
    """They are derived from the whole device, of which others have 20 GiB."""
    room = foresee_kv_room(load_settings((), {}), recurrent_with(seat_bytes), FakeGauge())
    assert room.sizes.max_num_seqs == seats and room.count_blocks() > 0


def test_seats_are_fewer_where_less_is_left_than_was_foreseen() -> None:
    loaded, settings = recurrent_with(3 * GIB), load_settings(("--kv-cache-memory", "10GiB"), {})
    sampler = Sampler(loaded.vocab_size, loaded.device)
    sizes = foresee_kv_room(settings, loaded, FakeGauge()).sizes
    foreseen = replace(sizes, max_num_seqs=32)
    room = measure_kv_room(settings, loaded, sampler, FakeGauge(), foreseen)
    assert room.sizes.max_num_seqs == sizes.max_num_seqs == 2
    assert room.sizes.origins["max_num_seqs"] == "derived: the states of more find no memory"


def test_seats_that_are_given_are_refused_where_their_states_do_not_fit() -> None:
    settings = load_settings(("--max-num-seqs", "64"), {})
    with pytest.raises(StartRefused, match="states of max-num-seqs 64 take"):
        foresee_kv_room(settings, recurrent_with(GIB), FakeGauge()).count_blocks()
    with pytest.raises(StartRefused, match="states of max-num-seqs 1 take"):
        foresee_kv_room(load_settings((), {}), recurrent_with(60 * GIB), FakeGauge()).count_blocks()
