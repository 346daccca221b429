"""KvRoom: the memory for K/V and states, and how many blocks, snapshots and swapped requests it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from config import Settings
from config.units import rough_size
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.drafters.draft_loader import TargetRoom
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.slot_states import LEAST_KEPT_ROWS, state_bytes
from engine.compute.runner.largest_step import LargestStep, measure_largest_step
from engine.compute.runner.memory_gauge import MemoryGauge
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused
from engine.startup.build_runner import recorded_bytes
from engine.startup.build_speculation import foreseen_draft_tokens
from engine.startup.step_sizes import (
    NOTHING_BESIDE,
    MemoryBeside,
    ModelNeeds,
    StepSizes,
    is_kv_given,
    step_sizes,
)

log = logging.getLogger("slipstream.engine")

_SNAPSHOT_SHARE = 8  # one part in so many of the memory for K/V: a state weighs what many blocks do
_MOST_SNAPSHOTS = 1024
_SHARE = "--gpu-memory-utilization"


class KvMemory(NamedTuple):
    """The bytes for K/V and states, and the setting that says so: a flag and its value."""

    num_bytes: int
    source: str


def find_kv_memory(
    settings: Settings,
    loaded: LoadedModel,
    sizes: StepSizes,
    gauge: MemoryGauge | None,
    work_bytes: int,
    coming: int = 0,
) -> KvMemory:
    """What is given, or of a GPU its share of the memory less all that is there and will be.

    There is what `gauge` says, weights above all. There will be `coming` bytes, of weights that are not
    loaded yet and of what drafters read, what steps are computed in, `work_bytes`, and their recordings.
    `gauge` is None on a CPU.
    """
    cache = settings.cache
    if gauge is None or "kv_cache_memory" in cache.model_fields_set:
        return KvMemory(cache.kv_cache_memory, f"--kv-cache-memory {cache.kv_cache_memory}")
    free, total = gauge.free_and_total()
    may_take = int(total * cache.gpu_memory_utilization) - (total - free)
    left = may_take - coming - work_bytes - recorded_bytes(settings, loaded, sizes)
    return KvMemory(max(0, left), f"{_SHARE} {cache.gpu_memory_utilization}")


class HostRoom(NamedTuple):
    """What --swap-space holds of preempted requests: K/V blocks, and states where a model has them."""

    num_blocks: int = 0
    num_states: int = 0
    num_bytes: int = 0
    state_bytes: int = 0  # of one


@dataclass(frozen=True, slots=True)
class KvRoom:
    """How the memory for K/V is divided, by the settings and the sizes of a start. Any thread.

    `drafts` bytes of the memory are what drafters will keep of sequences; 0 once they are there.
    """

    settings: Settings
    loaded: LoadedModel
    sizes: StepSizes
    memory: KvMemory
    drafts: int = 0

    @property
    def num_bytes(self) -> int:
        """The model's own part of the memory."""
        return max(0, self.memory.num_bytes - self.drafts)

    @property
    def for_drafters(self) -> TargetRoom:
        """What drafters are given shares of: the room that the model would have without them.

        Raises StartRefused as `count_blocks` does.
        """
        kv_bytes = replace(self, drafts=0).count_blocks() * self.block_bytes
        return TargetRoom(self.sizes.max_num_seqs, self.sizes.kv_block_size, kv_bytes)

    @property
    def block_bytes(self) -> int:
        """What a block takes in all layers; 0 for a model that attends nowhere."""
        return bytes_per_block(self.loaded.layers, self.sizes.kv_block_size, self.loaded.kv_dtype)

    @property
    def longest(self) -> int:
        """Blocks of one sequence of max_model_len."""
        return -(-self.loaded.max_model_len // self.sizes.kv_block_size)

    @property
    def seats_bytes(self) -> int:
        """What a recurrent model keeps for every seat, with the rows of as many drafts as there may be."""
        return self._states_bytes(self.sizes.max_num_seqs)

    @property
    def holds_seats(self) -> bool:
        """Whether one sequence's K/V fits beside the states of all seats; true of a model without states."""
        left = self.num_bytes - self.seats_bytes
        return not self.seats_bytes or left >= self.longest * self.block_bytes

    def count_blocks(self) -> int:
        """How many K/V blocks fit the memory; at least one sequence of max_model_len, or StartRefused.

        What a recurrent model keeps for each seat, and its snapshots, come out of the same memory. One that
        attends nowhere needs none for its blocks, which then only count tokens.
        """
        cache, block_bytes, needed = self.settings.cache, self.block_bytes, self.longest
        memory, source = self.num_bytes, self.memory.source
        left = memory - self.seats_bytes
        if not self.holds_seats:
            raise StartRefused(
                f"The recurrent states of max-num-seqs {self.sizes.max_num_seqs} take {self.seats_bytes} "
                f"bytes and one sequence's K/V {needed * block_bytes} bytes; {source} gives {memory}. "
                "Raise it, or lower --max-num-seqs."
            )
        if cache.num_kv_blocks is not None:
            num_blocks, source = cache.num_kv_blocks, f"--num-kv-blocks {cache.num_kv_blocks}"
        elif block_bytes == 0:
            return needed * self.sizes.max_num_seqs
        else:
            kept = state_bytes(self.loaded.states, self.loaded.dtype, self.count_snapshots())
            num_blocks = (left - kept) // block_bytes
        if num_blocks < needed:
            # The share of a GPU is what others leave, who take some of it for each seat.
            by_seats = " or --max-num-seqs" if source.startswith(_SHARE) else ""
            raise StartRefused(
                "The KV cache is too small for one sequence of max-model-len "
                f"{self.loaded.max_model_len}: that needs {needed} blocks of {self.sizes.kv_block_size} "
                f"tokens ({needed * block_bytes} bytes), {source} gives {max(0, num_blocks)}. "
                f"Raise it, or lower --max-model-len{by_seats}."
            )
        return num_blocks

    def count_snapshots(self) -> int:
        """How many states of a recurrent model are kept for prompts that begin alike; 0 without that cache.

        They get a share of the memory behind the seats, but nothing that one sequence of max_model_len needs.
        """
        each = state_bytes(self.loaded.states, self.loaded.dtype)
        if not each or not self.settings.cache.prefix_caching:
            return 0
        left = self.num_bytes - self.seats_bytes
        spare = left - self.longest * self.block_bytes
        return min(_MOST_SNAPSHOTS, max(0, min(left // _SNAPSHOT_SHARE, spare)) // each)

    def count_host_room(self) -> HostRoom:
        """None when nothing is ever swapped. States get half at most, or all if there is nothing else."""
        space, block_bytes = self.settings.cache.swap_space, self.block_bytes
        if self.settings.scheduler.preemption == "recompute":
            return HostRoom()
        if not self.loaded.keeps_state:
            num_blocks = space // block_bytes
            return HostRoom(num_blocks, num_bytes=num_blocks * block_bytes)
        each = self._states_bytes(1)
        if not block_bytes:
            num_states = space // each
            return HostRoom(num_states * self.longest, num_states, num_states * each, each)
        num_states = space // 2 // each
        num_blocks = (space - num_states * each) // block_bytes
        return HostRoom(num_blocks, num_states, num_states * each + num_blocks * block_bytes, each)

    def _states_bytes(self, num_seats: int) -> int:
        num_kept = max(LEAST_KEPT_ROWS, foreseen_draft_tokens(self.settings))
        return state_bytes(self.loaded.states, self.loaded.dtype, num_seats, num_kept)


def foresee_kv_room(
    settings: Settings,
    loaded: LoadedModel,
    gauge: MemoryGauge | None,
    beside: MemoryBeside = NOTHING_BESIDE,
    *,
    is_loaded: bool = True,
) -> KvRoom:
    """The room as it can be told before steps can run; without `is_loaded` the weights are not there yet.

    What lies `beside` the model's never is. `gauge` is None on a CPU. Raises StartRefused.
    """
    needs = ModelNeeds.of(settings, loaded, beside)
    sizes = step_sizes(settings, needs, None if gauge is None else gauge.free_and_total()[1])
    coming = beside.total + (0 if is_loaded else needs.weights)

    def find(sizes: StepSizes) -> KvMemory:
        return find_kv_memory(settings, loaded, sizes, gauge, needs.work(sizes), coming)

    room = _with_seats_that_fit(KvRoom(settings, loaded, sizes, find(sizes)), find)
    if gauge is None or is_kv_given(settings) or not beside.kept:
        return room
    return replace(room, drafts=beside.kept_bytes(room.for_drafters))


def measure_kv_room(
    settings: Settings,
    loaded: LoadedModel,
    sampler: Sampler,
    gauge: MemoryGauge | None,
    sizes: StepSizes | None = None,
    coming: Callable[[int], int] = lambda _: 0,
) -> KvRoom:
    """The room once the drafters' weights are there, with work space as measured; on the model's thread.

    `sizes` are those foreseen, None where nothing was made by them; `coming` says how many bytes will come
    later, with so many seats. Of a step that finds no memory the tokens are halved as far as nobody has asked
    for so many. Raises StartRefused.
    """
    if sizes is None:
        sizes = foresee_kv_room(settings, loaded, gauge).sizes
    work_bytes = 0
    if gauge is not None and "kv_cache_memory" not in settings.cache.model_fields_set:
        sizes, work_bytes = _measure(loaded, sampler, gauge, sizes, foreseen_draft_tokens(settings))
        log.info("the largest step works in %s", rough_size(work_bytes))

    def find(sizes: StepSizes) -> KvMemory:
        return find_kv_memory(settings, loaded, sizes, gauge, work_bytes, coming(sizes.max_num_seqs))

    return _with_seats_that_fit(KvRoom(settings, loaded, sizes, find(sizes)), find)


def _with_seats_that_fit(room: KvRoom, find: Callable[[StepSizes], KvMemory]) -> KvRoom:
    """The room with as many seats as it holds the states of, as far as nobody has asked for so many.

    `find` tells its memory with fewer of them.
    """
    while not room.holds_seats and (fewer := room.sizes.with_fewer_seats()) is not None:
        room = replace(room, sizes=fewer, memory=find(fewer))
    return room


def _measure(
    loaded: LoadedModel, sampler: Sampler, gauge: MemoryGauge, sizes: StepSizes, num_drafts: int
) -> tuple[StepSizes, int]:
    """What the largest step takes, and the sizes that it has after all. Raises StartRefused."""
    num_tokens, num_rows = sizes.max_num_batched_tokens, sizes.rows_with(num_drafts)
    largest = LargestStep(num_tokens, sizes.max_num_seqs, sizes.kv_block_size, num_rows)
    try:
        return sizes, measure_largest_step(loaded, sampler, largest, gauge)
    except StartRefused:
        fewer = sizes.with_fewer_tokens()
        if fewer is None:
            raise
    log.warning("a step of %d tokens finds no memory: trying fewer", sizes.max_num_batched_tokens)
    return _measure(loaded, sampler, gauge, fewer, num_drafts)
