"""Load and put together the parts of an engine from settings: the only place that knows every part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from config import Settings
from config.units import format_size
from engine.compute.cuda.layer_choice import with_fast_layers
from engine.compute.loading.default_sampling import read_default_sampling
from engine.compute.loading.loader import LoadedModel, choose_device, load_model
from engine.compute.loading.model_files import first_line
from engine.compute.loading.model_source import resolve_model
from engine.compute.loading.support import read_architecture
from engine.compute.native.drawing import find_row_draw
from engine.compute.native.install import with_checked_kernels
from engine.compute.native.scratch import scratch_bytes
from engine.compute.native.stored import take_weights
from engine.compute.native.weight_formats import weight_bytes_by_format
from engine.compute.runner.compute_threads import choose_threads
from engine.compute.runner.device import is_out_of_memory
from engine.compute.runner.kept_kv import check_kept_kv, with_kept_kv
from engine.compute.runner.memory_gauge import gauge_of
from engine.compute.runner.model_runner import ForDrafts
from engine.compute.runner.step_profile import ProfileLimits, StepProfile, profile_steps
from engine.compute.runner.thread_follower import ThreadFollower
from engine.embeddings.shared_thread import GAP_LIMIT_S, LEAST_TURN_S
from engine.errors import StartRefused
from engine.loop.engine_parts import EngineInfo, EngineParts, StepRunner
from engine.plan.kv.paged_kv_manager import PagedKvManager, Rewindable
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import FairnessWeights, make_policy
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.startup.build_runner import RunnerSizes, make_runner
from engine.startup.build_speculation import (
    draft_methods,
    feature_layers,
    load_sources,
    make_decoder,
    max_draft_tokens,
    told_bytes,
    use_kernels,
)
from engine.startup.cpu_limit import thread_counts, usable_cores, whole_cores
from engine.startup.kv_room import HostRoom, foresee_kv_room, measure_kv_room
from engine.startup.memory_beside import foresee_memory_beside, round_bytes
from engine.startup.memory_nodes import spread_memory, usable_nodes
from engine.startup.part_factories import PLAIN_FACTORIES, PartFactories
from engine.startup.step_sizes import StepSizes
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream.engine")


@contextmanager
def refused_without_memory() -> Iterator[None]:
    """Have memory that ends while a model is loaded refuse the start. Raises StartRefused.

    Most of what will be needed is weighed before; others may take memory meanwhile.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartRefused(
            f"Memory has ended while the model was loaded: {first_line(error)}. Lower --kv-cache-memory, "
            "--gpu-memory-utilization or --max-num-seqs, or leave out what drafts or embeds beside it."
        ) from error


@refused_without_memory()
def load_parts(settings: Settings, factories: PartFactories = PLAIN_FACTORIES) -> EngineParts:
    """Load the model and size everything around it; on the thread that will run it. Raises StartRefused."""
    use_compute_threads()
    use_memory_nodes(choose_device(settings.model.device))
    directory = resolve_model(settings.model, settings.home)
    read_architecture(directory)  # or the tokenizer's loading stumbles over what is wrong with it
    tokenizer = factories.tokenizer(directory, read_chat_template(settings))
    loaded = with_kept_kv(load_model(directory, settings.model), settings.cache)
    loaded = take_weights(loaded, settings.model, settings.home)
    beside = foresee_memory_beside(settings, loaded, directory)
    room = foresee_kv_room(settings, loaded, gauge_of(loaded.device), beside)
    block_size = room.sizes.kv_block_size
    sources = load_sources(settings, loaded, directory, room.for_drafters)

    def reload() -> LoadedModel:
        return with_kept_kv(load_model(directory, settings.model), settings.cache)

    loaded = with_checked_kernels(loaded, settings.model, settings.home, reload, block_size)
    loaded = with_fast_layers(loaded, settings.model, block_size, reload)
    check_kept_kv(loaded, block_size)
    use_kernels(sources, loaded, settings.model, block_size)
    threads = str(choose_threads(loaded, worthwhile_threads()))
    log.debug("compute threads: %s", threads)
    files = FromFiles(directory, room.sizes, beside.embeddings)
    parts = put_together(settings, loaded, tokenizer, sources, factories, files)
    info = replace(
        parts.info,
        compute_threads=threads,
        kernels=loaded.kernels_used,
        default_sampling=read_default_sampling(directory, settings.model.model),
    )
    return replace(parts, info=info)


class FromFiles(NamedTuple):
    """What is known of a model that was loaded: where its files are, and the sizes its drafters have.

    `coming` are bytes that are taken after all of it.
    """

    directory: Path
    sizes: StepSizes
    coming: int = 0


def put_together(
    settings: Settings,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    sources: tuple[DraftSource, ...] = (),
    factories: PartFactories = PLAIN_FACTORIES,
    files: FromFiles | None = None,
) -> EngineParts:
    """Everything around a model that is in memory, as are the models that draft for it, ready for requests.

    Without `files` no K/V is kept on disk, where it is told by them. On the thread that will run it. Raises
    StartRefused where the K/V does not fit.
    """
    row_draw = find_row_draw(loaded, settings.model, settings.home)
    sampler = factories.sampler(loaded.vocab_size, loaded.device, row_draw)
    gauge, sizes = gauge_of(loaded.device), files and files.sizes
    for_drafts = ForDrafts(
        verification=settings.speculation.draft_verification,
        keeps_features=any(source.drafter.reads_features for source in sources),
        feature_layers=feature_layers(sources),
        feature_window=max((source.feature_window for source in sources), default=1),
    )

    def coming(num_seqs: int) -> int:
        held = for_drafts.held_bytes(loaded, num_seqs, max_draft_tokens(sources))
        held += round_bytes(settings, loaded, for_drafts, num_seqs)
        return held + told_bytes(settings, loaded, num_seqs) + (files.coming if files else 0)

    room = measure_kv_room(settings, loaded, sampler, gauge, sizes, coming)  # of what drafters have left
    num_blocks, step, host = room.count_blocks(), room.sizes, room.count_host_room()
    sources = tuple(
        replace(source, drafter=factories.drafter(source.drafter, loaded.vocab_size)) for source in sources
    )
    of_runner = RunnerSizes(
        num_blocks,
        step.kv_block_size,
        host.num_blocks,
        step.max_num_seqs,
        step.max_num_batched_tokens,
        max_draft_tokens(sources),
        room.count_snapshots(),
        host.num_states,
    )
    with refused_where_memory_ends(settings, on_gpu=loaded.device.type == "cuda"):
        runner = make_runner(loaded, sampler, of_runner, for_drafts)
        runner.warm_up()
    info = EngineInfo(
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        num_kv_blocks=num_blocks,
        kv_block_size=step.kv_block_size,
        kv_bytes=num_blocks * room.block_bytes,
        has_chat_template=tokenizer.has_chat_template,
        draft_methods=draft_methods(sources),
        max_draft_tokens=max_draft_tokens(sources),
        num_host_blocks=host.num_blocks,
        host_state_bytes=host.state_bytes,
        num_state_snapshots=of_runner.num_snapshots,
        scratch_bytes=scratch_bytes(loaded, step.max_num_batched_tokens),
        kv_dtype=str(loaded.kv_dtype).removeprefix("torch."),
        weight_bytes=weight_bytes_by_format(loaded.model),
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_logits_rows=step.max_logits_rows,
        size_origins=step.origins,
    )
    with refused_where_memory_ends(settings):
        kv = make_kv_manager(info, host, loaded.rewindable)
    decoder = make_decoder(settings, sources, loaded.vocab_size, kv)
    batcher = make_batcher(settings, info, kv, decoder, factories.batcher)
    if not loaded.keeps_state:
        seed_costs(batcher, profile_steps(runner.run, profile_limits(info)))
    prefix_store = None
    if files is not None and settings.cache.prefix_cache_dir is not None:
        from engine.startup.build_disk_cache import open_disk_cache  # which alone needs xxhash

        prefix_store = open_disk_cache(settings, loaded, files.directory, runner.kv, batcher)
    runner_as_used = factories.runner(following_cores(runner, loaded), loaded)
    reply_format = tokenizer.reply_format(
        reasoning=settings.server.reasoning_parser, tools=settings.server.tool_call_parser
    )
    return EngineParts(
        runner_as_used,
        batcher,
        tokenizer,
        loaded.eos_token_ids,
        info,
        reply_format,
        factories.detokenizer,
        prefix_store,
    )


def following_cores(runner: StepRunner, loaded: LoadedModel) -> StepRunner:
    """The runner, with as many compute threads as there are cores for while it serves.

    Where kernels compute the model with several; else it stays as it is.
    """
    if loaded.kernels is None or loaded.team is None or loaded.team.size == 1:
        return runner
    return ThreadFollower(runner, loaded.team)


@contextmanager
def refused_where_memory_ends(settings: Settings, *, on_gpu: bool = False) -> Iterator[None]:
    """Have memory that the system or the GPU does not give refuse the start. Raises StartRefused."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        cache, place = settings.cache, "GPU" if on_gpu else "system"
        given = f"--kv-cache-memory {format_size(cache.kv_cache_memory)}"
        if on_gpu and "kv_cache_memory" not in cache.model_fields_set:
            given = f"--gpu-memory-utilization {cache.gpu_memory_utilization}"
        if cache.num_kv_blocks is not None:
            given = f"--num-kv-blocks {cache.num_kv_blocks}"
        raise StartRefused(f"{given}: the {place} does not give as much memory. Lower it.") from error


def profile_limits(info: EngineInfo) -> ProfileLimits:
    """What the steps that are measured may use."""
    return ProfileLimits(
        num_blocks=info.num_kv_blocks,
        block_size=info.kv_block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_draft_tokens=info.max_draft_tokens,
    )


def seed_costs(batcher: ContinuousBatcher, profile: StepProfile) -> None:
    """Tell the scheduler and the drafts' controller what was measured."""
    batcher.decoder.costs.seed(profile.decodes)
    plain = [(0, num_seqs, s) for num_seqs, num_tokens, s in profile.decodes if num_seqs == num_tokens]
    if profile.chunk is not None and plain:
        num_tokens, seconds = profile.chunk
        batcher.rates.seed([*plain, (num_tokens, 0, seconds)])


def worthwhile_threads() -> tuple[int, ...]:
    """The numbers of compute threads that a start tries, what it begins with first."""
    return thread_counts(usable_cores(), whole_cores())


def use_compute_threads() -> None:
    """Give the calling thread's tensor operations every core this process may use.

    They take numbers below the normal range of floats for zero, which recurrent states decay to: with such
    each operation takes up to a hundred times as long. Threads begun from here on inherit that.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(usable_cores())


def use_memory_nodes(device: torch.device) -> None:
    """Spread what the calling thread loads over the memory nodes of all cores that compute."""
    nodes = usable_nodes()
    if device.type != "cpu" or len(nodes) < 2:
        return
    if spread_memory(nodes):
        log.info("memory is spread over %d nodes", len(nodes))
    else:
        log.info("memory stays on the node of the thread that writes it: numactl or the container says so")


def read_chat_template(settings: Settings) -> str | None:
    """The text of --chat-template; None uses the model's own."""
    path = settings.model.chat_template
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefused(f"--chat-template {path}: cannot be read ({error}).") from error


def step_limit_s(settings: Settings) -> float:
    """How long a step should take while streams wait: the rest of the gap is for a pass of embeddings."""
    return GAP_LIMIT_S if settings.model.embedding_model is None else GAP_LIMIT_S - LEAST_TURN_S


def make_kv_manager(info: EngineInfo, host: HostRoom, rewindable: Rewindable) -> PagedKvManager:
    """Who accounts for the K/V."""
    kv = PagedKvManager(
        num_blocks=info.num_kv_blocks,
        block_size=info.kv_block_size,
        max_num_seqs=info.max_num_seqs,
        max_blocks_per_seq=-(-info.max_model_len // info.kv_block_size),
        num_host_blocks=host.num_blocks,
        rewindable=rewindable,
    )
    if kv.keeps_state:
        kv.keep_states(info.num_state_snapshots, host.num_states)
    return kv


def make_batcher(
    settings: Settings,
    info: EngineInfo,
    kv: PagedKvManager,
    decoder: SpeculativeDecoder | None,
    kind: Callable[..., ContinuousBatcher] = ContinuousBatcher,
) -> ContinuousBatcher:
    """The scheduler with its limits and its policy.

    State that lies in no block is shared only by forks and where snapshots of it are kept.
    """
    scheduler = settings.scheduler
    config = BatchConfig(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_prefill_tokens=scheduler.max_prefill_tokens or info.max_num_batched_tokens,
        max_decode_seqs=scheduler.max_decode_seqs or info.max_num_seqs,
        max_model_len=info.max_model_len,
        max_logits_rows=info.max_logits_rows,
        prefix_caching=settings.cache.prefix_caching and (not kv.keeps_state or kv.snapshots.num_slots > 0),
        preemption=scheduler.preemption,
        kv_block_bytes=info.kv_bytes // info.num_kv_blocks,
        state_bytes=info.host_state_bytes,
        gap_limit_s=step_limit_s(settings) if scheduler.max_prefill_tokens is None else None,
    )
    weights = FairnessWeights(tenants=scheduler.tenant_weights)
    policy = make_policy(scheduler.scheduling_policy, scheduler.priority_aging_seconds, weights)
    return kind(config, kv, policy, decoder=decoder)
