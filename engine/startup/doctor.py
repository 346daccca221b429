"""diagnose: what a start with some settings would use, and what would stop it, without loading any weights.

Every check is the one that the start itself makes, on the model's outline in place of the model.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from config import Settings, SpeculationSettings
from engine.compute.cuda.coded_choice import kept_kinds
from engine.compute.drafters.draft_loader import (
    check_vocabulary,
    draft_kv_bytes,
    draft_model_settings,
    draft_sizes,
    is_on_host,
    named_as_draft,
)
from engine.compute.drafters.eagle_layer import check_eagle
from engine.compute.drafters.medusa import check_medusa
from engine.compute.embedding.source import is_embedding_model
from engine.compute.loading.coded_weights import CodeKind
from engine.compute.loading.default_sampling import read_default_sampling
from engine.compute.loading.gguf_file import part_paths, read_gguf
from engine.compute.loading.loader import LoadedModel, choose_device, may_use_kernels
from engine.compute.loading.locate import FoundModel, find_model
from engine.compute.loading.model_files import gguf_of
from engine.compute.loading.outline import NoOutline, check_head, outline_model, read_stored, weight_bytes
from engine.compute.loading.quantized_files import foresee_stored
from engine.compute.loading.support import Architecture, weight_format_of
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.install import foresee, foresee_scratch, refuse_without
from engine.compute.native.quantization import foresee_weights
from engine.compute.recurrent.slot_states import state_bytes
from engine.compute.runner.device import gpu_has_bfloat16
from engine.compute.runner.kept_kv import with_kept_kv
from engine.compute.runner.memory_gauge import gauge_of
from engine.errors import StartRefused
from engine.startup.build import read_chat_template, use_compute_threads, worthwhile_threads
from engine.startup.build_embeddings import examine_embeddings
from engine.startup.build_runner import recorded_bytes
from engine.startup.build_speculation import (
    draft_methods,
    draft_model_room,
    find_heads,
    find_module,
    foreseen_draft_tokens,
    model_free_sources,
)
from engine.startup.diagnosis import CacheFacts, DeviceFacts, Diagnosis, DraftFacts, ModelFacts
from engine.startup.host_memory import memory_bytes, weigh
from engine.startup.kv_room import KvRoom, foresee_kv_room
from engine.startup.memory_beside import (
    foresee_codes_kept,
    foresee_memory_beside,
    foresee_reader,
    outline_draft_model,
    round_bytes,
)
from engine.startup.step_sizes import ModelNeeds
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream.engine")


def diagnose(settings: Settings, *, reads_tokenizer: bool = True) -> Diagnosis:
    """Look at everything a start would use. Takes a second or two, and no network.

    Without `reads_tokenizer` it is half as long: a start reads that itself, before the weights.
    """
    found = Diagnosis()
    use_compute_threads()
    device = found.attempt(lambda: choose_device(settings.model.device))
    if device is not None:
        found.device = _describe_device(device, settings.model.device)
    found.attempt(lambda: examine_embeddings(found, settings))
    if found.attempt(lambda: is_embedding_model(settings.model, may_fetch=False)):
        return found
    source = found.attempt(lambda: find_model(settings.model, settings.home))
    if source is not None:
        _examine_model(found, settings, source, reads_tokenizer)
    weigh(found, memory_bytes())
    return found


def check_start(settings: Settings) -> None:
    """Raise StartRefused for the first problem that the doctor finds; the log has what it warns of.

    What is wrong with the tokenizer shows when a start reads it.
    """
    found = diagnose(settings, reads_tokenizer=False)
    for problem in found.problems:
        raise StartRefused(problem)
    for warning in found.warnings:
        log.warning("%s", warning)


def _describe_device(device: torch.device, asked: str) -> DeviceFacts:
    if asked != "auto":
        why = f"asked for by --device {asked}"
    elif device.type == "cuda":
        why = "a CUDA device is there"
    else:
        why = "no CUDA device" if torch.version.cuda else "this build of torch has no CUDA"
    facts = DeviceFacts(
        device=str(device),
        name="",
        why=why,
        features={},
        capability=torch.backends.cpu.get_cpu_capability(),
        one_dnn=torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        num_threads=torch.get_num_threads(),
    )
    if device.type == "cuda":
        facts.name = torch.cuda.get_device_name(device)
        facts.capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts.features = {"bfloat16": gpu_has_bfloat16(device)}
        facts.free_bytes, facts.memory_bytes = torch.cuda.mem_get_info(device)
    else:
        facts.thread_counts = worthwhile_threads()
        facts.features = {
            "AVX2": bool(torch.cpu._is_avx2_supported()),
            "AVX-512": bool(torch.cpu._is_avx512_supported()),
            "AVX-512 BF16": bool(torch.cpu._is_avx512_bf16_supported()),
            "AMX": bool(torch.cpu._is_amx_tile_supported()),
        }
    return facts


def _examine_model(found: Diagnosis, settings: Settings, source: FoundModel, reads_tokenizer: bool) -> None:
    """Everything that follows from the model, as far as it is here."""
    directory = source.directory
    found.model = model = ModelFacts(
        settings.model.model, source.how, None if directory is None else str(directory), source.pending
    )
    if source.gguf is not None and not source.as_it_is:
        sizes = [part.stat().st_size for part in part_paths(source.gguf) if part.exists()]
        _check_room(found, settings.home, 8 * sum(sizes))
    stored = found.attempt(lambda: read_stored(source))
    if stored is None:
        if not found.problems:
            found.warnings.append("The model is not here yet: what it needs cannot be told.")
        return
    architecture, dtype = stored
    model.architecture = architecture.model_class.__name__
    if directory is not None and source.pending is None and reads_tokenizer:
        template = found.attempt(lambda: read_chat_template(settings))
        tokenizer = found.attempt(lambda: Tokenizer(directory, template))
        model.has_chat_template = None if tokenizer is None else tokenizer.has_chat_template
    if directory is not None:
        name = settings.model.model
        model.default_sampling = found.attempt(lambda: read_default_sampling(directory, name))
    outline = _outline(found, settings, architecture, dtype)
    if outline is not None:
        if directory is not None and source.pending is None:
            found.attempt(lambda: check_head(directory, architecture, outline.model))
        _describe_model(model, outline, dtype, settings.model.dtype)
        kinds = kept_kinds(outline.device, settings.model)
        _describe_stored(model, source, architecture, kinds)
        _foresee_kept(model, settings, outline, source, architecture)
        gauge = gauge_of(outline.device)
        beside = foresee_memory_beside(settings, outline, directory, may_fetch=False)
        room = found.attempt(lambda: foresee_kv_room(settings, outline, gauge, beside, is_loaded=False))
        if room is None:
            return
        num_tokens = room.sizes.max_num_batched_tokens
        model.compiled = found.attempt(
            lambda: _foresee_kernels(model, settings, outline, num_tokens, source.as_it_is)
        )
        if settings.model.quantization != "none" and model.compiled is not None and not kinds:
            model.quantized = foresee_weights(outline.model, outline.dtype, settings.model.quantization)
        _warn_of_slow_dtype(found, settings, outline)
        _examine_cache(found, settings, room)
        _examine_drafts(found, settings, room, source)


def _outline(
    found: Diagnosis, settings: Settings, architecture: Architecture, dtype: torch.dtype
) -> LoadedModel | None:
    try:
        return found.attempt(
            lambda: with_kept_kv(outline_model(architecture, dtype, settings.model), settings.cache)
        )
    except NoOutline as reason:
        found.warnings.append(
            f"What {architecture.model_class.__name__} needs shows only in loading it: try --load ({reason})."
        )
        return None


def _describe_model(model: ModelFacts, outline: LoadedModel, stored: torch.dtype, asked: str) -> None:
    chosen = outline.dtype
    model.dtype = _name(chosen)
    if asked != "auto":
        model.dtype_why = f"asked for by --dtype {asked}; stored as {_name(stored)}"
    elif chosen is stored:
        model.dtype_why = "as the weights are stored"
    else:
        model.dtype_why = f"the weights are {_name(stored)}, which this device does not compute natively"
    model.num_parameters = sum(weights.numel() for weights in outline.model.parameters())
    model.weight_bytes = weight_bytes(outline.model)
    model.max_model_len = outline.max_model_len
    model.vocab_size = outline.vocab_size


def _foresee_kept(
    model: ModelFacts,
    settings: Settings,
    outline: LoadedModel,
    source: FoundModel,
    architecture: Architecture,
) -> None:
    """What is saved where weights stay as files have them, or a GPU rounds them to codes."""
    weight_format = weight_format_of(architecture.config)
    directory = source.directory if source.pending is None else None
    model.quantized = foresee_codes_kept(outline, settings.model, directory, architecture)
    if kept_kinds(outline.device, settings.model):
        model.weight_bytes = weight_bytes(outline.model)
    elif weight_format is None or directory is None or settings.model.quantization != "none":
        return
    elif may_use_kernels(type(outline.model), outline.device, settings.model):
        saved = foresee_stored(outline.model, directory, weight_format, outline.dtype)
        model.weight_bytes = weight_bytes(outline.model) - saved


def _describe_stored(
    model: ModelFacts, source: FoundModel, architecture: Architecture, kinds: frozenset[CodeKind]
) -> None:
    """The weights of a GGUF file that is run as it is, and quantized ones of safetensors."""
    if (weight_format := weight_format_of(architecture.config)) is not None:
        model.dtype_why = f"to compute in; the weights are stored as {weight_format.words(kinds)}"
    if not source.as_it_is:
        return
    path = source.gguf or (None if source.directory is None else gguf_of(source.directory))
    if path is not None:
        formats = read_gguf(path).format_bytes
        model.weight_bytes = sum(formats.values())
        model.dtype_why = f"to compute in; the weights stay in {', '.join(formats)}"


def _foresee_kernels(
    model: ModelFacts, settings: Settings, outline: LoadedModel, num_tokens: int, has_stored: bool
) -> str:
    """What they are used for; notes the memory they work in. Raises StartRefused as loading would."""
    if settings.model.compile == "off":
        return "not used: --compile off"
    formats = has_stored or settings.model.quantization == "int4"
    try:
        used_for = foresee(outline, settings.home, settings.model.cpu_kernels, formats=formats)
        model.scratch_bytes = foresee_scratch(outline, max(worthwhile_threads()), num_tokens)
        return used_for
    except NativeUnavailable as reason:
        if model.quantized is None:  # which another device does without them
            refuse_without(settings.model, reason)
        return f"not used: {reason}"


def _warn_of_slow_dtype(found: Diagnosis, settings: Settings, outline: LoadedModel) -> None:
    if may_use_kernels(type(outline.model), outline.device, settings.model):
        return
    features = found.device.features if found.device is not None else {}
    native = any(features.get(name) for name in ("AVX-512 BF16", "AMX", "bfloat16"))
    is_slow = outline.dtype is torch.bfloat16 and not native
    if outline.device.type == "cpu" and (is_slow or outline.dtype is torch.float16):
        found.warnings.append(
            f"This CPU does not compute {_name(outline.dtype)} natively: --dtype float32 is faster."
        )


def _examine_cache(found: Diagnosis, settings: Settings, room: KvRoom) -> None:
    """Sizes as `load_parts` makes them, and its refusals."""
    num_blocks = found.attempt(room.count_blocks)
    if num_blocks is None:
        return
    outline, sizes, host = room.loaded, room.sizes, room.count_host_room()
    num_snapshots = room.count_snapshots()
    given = settings.cache.num_kv_blocks
    found.cache = CacheFacts(
        num_kv_blocks=num_blocks,
        kv_block_size=sizes.kv_block_size,
        kv_bytes=num_blocks * room.block_bytes,
        source=room.memory.source.split()[0] if given is None else "--num-kv-blocks",
        num_full_seqs=num_blocks // room.longest,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        size_origins=sizes.origins,
        num_snapshots=num_snapshots,
        snapshot_bytes=state_bytes(outline.states, outline.dtype, num_snapshots),
        seats_bytes=room.seats_bytes,
        num_host_blocks=host.num_blocks,
        host_bytes=host.num_bytes,
    )
    if outline.device.type == "cuda":
        needs = ModelNeeds.of(settings, outline)
        found.cache.work_bytes = needs.work(sizes) + recorded_bytes(settings, outline, sizes)


def _examine_drafts(found: Diagnosis, settings: Settings, room: KvRoom, source: FoundModel) -> None:
    speculation = settings.speculation
    method = speculation.speculative_method
    if method == "none":
        found.drafts = DraftFacts(())
        return
    methods = draft_methods(tuple(model_free_sources(speculation)))
    found.drafts = facts = DraftFacts(methods)
    if method in ("auto", "draft-model") and speculation.draft_model is not None:
        facts.methods += ("draft-model",)
        found.attempt(lambda: _examine_draft_model(found, settings, room, source.directory))
    if method in ("auto", "medusa") and speculation.medusa_heads is not None:
        heads = speculation.medusa_heads
        facts.methods += ("medusa",)
        found.attempt(lambda: check_medusa(heads))
    elif method in ("auto", "heads", "mtp"):
        found.attempt(lambda: _examine_layers(facts, speculation, room.loaded, source))
    if not found.problems and found.cache is not None and facts.methods[-1] in ("medusa", "heads", "mtp"):
        found.attempt(lambda: _weigh_reader(facts, settings, room, source))


def _examine_layers(
    facts: DraftFacts, speculation: SpeculationSettings, outline: LoadedModel, source: FoundModel
) -> None:
    """Drafters of one layer. Raises StartRefused. Whether one fits these weights shows in loading them.

    Of a model that is here in part it is unknown whether it brings a module.
    """
    is_in_part = source.directory is not None and source.pending is not None
    heads = None if speculation.speculative_method == "mtp" else find_heads(speculation, outline)
    if heads is not None:
        check_eagle(heads, outline)
        facts.methods += ("heads",)
    elif not is_in_part and find_module(speculation, outline, source.directory) is not None:
        facts.methods += ("mtp",)


def _weigh_reader(facts: DraftFacts, settings: Settings, room: KvRoom, source: FoundModel) -> None:
    """Raises StartRefused."""
    reader = foresee_reader(settings, room.loaded, None if source.pending else source.directory)
    if reader is not None:
        facts.reader_bytes = reader.weights
        facts.reader_kv_bytes = reader.kept(room.for_drafters)
        if room.loaded.device.type == "cuda":
            seats, most_drafts = room.sizes.max_num_seqs, foreseen_draft_tokens(settings)
            facts.reader_held_bytes = reader.reads.held_bytes(room.loaded, seats, most_drafts)
            facts.reader_work_bytes = round_bytes(settings, room.loaded, reader.reads, seats)


def _examine_draft_model(found: Diagnosis, settings: Settings, room: KvRoom, directory: Path | None) -> None:
    """Raises StartRefused."""
    name = settings.speculation.draft_model
    assert name is not None
    with named_as_draft(name):
        _look_at_draft_model(name, found, settings, room, directory)


def _look_at_draft_model(
    name: str, found: Diagnosis, settings: Settings, room: KvRoom, directory: Path | None
) -> None:
    facts = found.drafts
    assert facts is not None
    asked = draft_model_settings(settings)
    source = find_model(asked, settings.home)
    facts.model_how = source.how
    if source.pending is not None:
        found.warnings.append(f"The draft model {name}: a start {source.pending}.")
    elif directory is not None and source.directory is not None:
        check_vocabulary(directory, source.directory)
    try:
        outline = outline_draft_model(asked, source, room.loaded.max_model_len)
    except NoOutline:
        return
    if outline is None:
        return
    facts.model_bytes = weight_bytes(outline.model)
    facts.is_on_host = is_on_host(settings, room.loaded)
    if found.cache is not None:
        own = draft_model_room(settings, room.loaded, room.for_drafters)
        sizes = draft_sizes(outline, room.loaded.vocab_size, own)
        facts.model_kv_bytes = draft_kv_bytes(outline, sizes)


def _check_room(found: Diagnosis, home: Path, most_bytes: int) -> None:
    """Warn when a conversion might not fit the disk; `most_bytes` is what it takes at worst."""
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < most_bytes:
        found.warnings.append(
            f"{free / 2**30:.1f} GiB are free in {place}; the converted model may take "
            f"{most_bytes / 2**30:.1f} GiB."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
