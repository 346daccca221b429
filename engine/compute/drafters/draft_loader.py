"""load_draft_model: from settings to a draft model that fits the target, in vocabulary and in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch

from config import ModelSettings, Settings, SpeculationSettings
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.recorder import CudaRecorder
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.cuda.layer_choice import with_fast_layers
from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes, OnDevice
from engine.compute.loading.loader import LoadedModel, load_model, own_context_length
from engine.compute.loading.model_files import first_line
from engine.compute.loading.model_source import beside_model, resolve_model
from engine.compute.loading.support import Architecture, exact_context_limit, read_architecture
from engine.compute.native.install import with_checked_kernels
from engine.compute.native.stored import take_weights
from engine.compute.runner.device import own_stream
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused, UnsupportedModel

log = logging.getLogger("slipstream.speculation")

# A draft model's KV may take this part of the target's, unless one sequence alone needs more.
KV_SHARE = 0.25
# What `auto` tries: the outcomes where one of the first drafts is wrong, which are the likeliest.
AUTO_LANES = 4


class TargetRoom(NamedTuple):
    """What the target serves from: its seats, how its K/V is cut, and the bytes of it all."""

    max_num_seqs: int
    block_size: int
    kv_bytes: int


def load_draft_model(
    settings: Settings, target: LoadedModel, target_directory: Path, room: TargetRoom
) -> DraftModelDrafter:
    """The drafter around `--draft-model`; on the thread that will draft. Raises StartRefused, one line.

    Its settings are the target's but for what `draft_model_settings` says; a context shorter than the
    target's only means that nothing is drafted beyond it.
    """
    name = settings.speculation.draft_model
    assert name is not None, "no draft model is asked for"
    with named_as_draft(name):
        return _load_drafter(name, settings, target, target_directory, room)


@contextmanager
def named_as_draft(name: str) -> Iterator[None]:
    """Have whatever refuses the draft model begin with its flag: the words may be those for a target."""
    try:
        yield
    except StartRefused as refusal:
        raise type(refusal)(f"--draft-model {name}: {refusal}") from refusal


def _load_drafter(
    name: str, settings: Settings, target: LoadedModel, target_directory: Path, room: TargetRoom
) -> DraftModelDrafter:
    source = draft_model_settings(settings)
    directory = resolve_model(source, settings.home)
    check_vocabulary(target_directory, directory)
    loaded = take_weights(_load(directory, source, target.max_model_len), source, settings.home)
    sizes = draft_sizes(loaded, target.vocab_size, room)
    sizes = replace(sizes, max_num_lanes=num_lanes(settings.speculation, loaded.device))
    log.info(
        "draft model %s: %.0f million parameters, %d KV blocks",
        name,
        loaded.model.num_parameters() / 1e6,
        sizes.num_blocks,
    )

    def reload() -> LoadedModel:
        return _load(directory, source, target.max_model_len)

    loaded = with_checked_kernels(loaded, settings.model, settings.home, reload, room.block_size)
    loaded = with_fast_layers(loaded, settings.model, room.block_size, reload)
    verification = settings.speculation.draft_verification
    return DraftModelDrafter(
        loaded,
        sizes,
        verification,
        on_device(loaded, sizes),
        shares_device=loaded.device == target.device,
    )


def draft_model_settings(settings: Settings) -> ModelSettings:
    """Those that `--draft-model` is loaded by, which has its files' own context, on a device of its own."""
    speculation = settings.speculation
    assert speculation.draft_model is not None, "no draft model is asked for"
    asked = beside_model(settings.model, speculation.draft_model)
    if speculation.draft_device == "auto":
        return asked
    return asked.model_copy(update={"device": speculation.draft_device})


def is_on_host(settings: Settings, target: LoadedModel) -> bool:
    """Whether the draft model lies on the CPU beside a target that does not."""
    return settings.speculation.draft_device == "cpu" and target.device.type != "cpu"


def num_lanes(speculation: SpeculationSettings, device: torch.device) -> int:
    """Other outcomes to draft for, of a sequence; for a draft model on `device`. Raises StartRefused."""
    asked = speculation.draft_lanes
    if device.type == "cpu":
        is_tried = asked is None and speculation.speculation_schedule == "auto"
        return AUTO_LANES if is_tried else asked or 0
    if asked:
        raise StartRefused(
            f"--draft-lanes {asked}: on a GPU a draft model draws whole chains. Add --draft-device cpu or "
            "leave it out."
        )
    return 0


def draft_sizes(loaded: LoadedModel, vocab_size: int, room: TargetRoom) -> DraftSizes:
    """What a draft model, or its outline, may use beside a target with such room and so many tokens."""
    memory_bytes = int(room.kv_bytes * KV_SHARE)
    num_blocks = count_draft_blocks(loaded, room.block_size, room.max_num_seqs, memory_bytes)
    return DraftSizes(vocab_size, num_blocks, room.block_size, room.max_num_seqs)


def draft_kv_bytes(loaded: LoadedModel, sizes: DraftSizes) -> int:
    """What the K/V of a draft model, or of its outline, takes."""
    return sizes.num_blocks * bytes_per_block(loaded.layers, sizes.block_size, loaded.dtype)


def on_device(loaded: LoadedModel, sizes: DraftSizes) -> OnDevice | None:
    """How a draft model on a GPU runs, warmed up, with K/V of its own; None on a CPU.

    Its steps are recorded in memory of their own, so that they may be at work beside the target's.
    """
    if loaded.device.type != "cuda":
        return None
    plain = ModelRunner(loaded, sizes.num_blocks, sizes.block_size, Sampler(loaded.vocab_size, loaded.device))
    recorder, draws = CudaRecorder(loaded.device), choose_draws(loaded.device)
    runner = CudaRunner(plain, sizes.max_num_seqs, draft_graphs(loaded, sizes), recorder, draws)
    runner.warm_up()
    return OnDevice(runner, own_stream(loaded.device))


def draft_graphs(loaded: LoadedModel, sizes: DraftSizes) -> GraphLimits:
    """What a draft model's recorded steps hold: after an accepted chain two tokens are new, else one."""
    max_blocks = -(-loaded.max_model_len // sizes.block_size)
    return GraphLimits(sizes.max_num_seqs, max_blocks, max_draft_tokens=1)


def count_draft_blocks(loaded: LoadedModel, block_size: int, max_num_seqs: int, memory_bytes: int) -> int:
    """KV blocks for a draft model: enough for all sequences at full length, or what `memory_bytes` holds.

    Never fewer than one sequence of full length needs.
    """
    longest = -(-loaded.max_model_len // block_size)
    affordable = memory_bytes // bytes_per_block(loaded.layers, block_size, loaded.dtype)
    return max(longest, min(max_num_seqs * longest, affordable))


def check_vocabulary(target_directory: Path, draft_directory: Path) -> None:
    """Raise StartRefused, naming the first difference, unless both give every token the same id."""
    target, draft = _vocabulary(target_directory), _vocabulary(draft_directory)
    if target == draft:
        return
    token_id = min(i for i in target.keys() | draft.keys() if target.get(i) != draft.get(i))
    raise StartRefused(
        f"The draft model {draft_directory} has another vocabulary than the target: token {token_id} is "
        f"{_shown(draft.get(token_id))}, the target's is {_shown(target.get(token_id))}."
    )


def _vocabulary(directory: Path) -> dict[int, str]:
    """Every token by its id, those that were added included."""
    path = directory / "tokenizer.json"
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception for files it cannot read
        raise StartRefused(f"{path} cannot be read: {first_line(error)}.") from error
    return {token_id: token for token, token_id in vocabulary.items()}


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def with_context(settings: ModelSettings, architecture: Architecture, max_model_len: int) -> ModelSettings:
    """The settings of a draft model with as much context as it has, at most `max_model_len`."""
    config = architecture.text_config
    limits = (own_context_length(config), exact_context_limit(config), max_model_len)
    return settings.model_copy(update={"max_model_len": min(each for each in limits if each is not None)})


def _load(directory: Path, settings: ModelSettings, max_model_len: int) -> LoadedModel:
    """The model with as much context as it has, at most `max_model_len`."""
    architecture = read_architecture(directory)
    loaded = load_model(directory, with_context(settings, architecture, max_model_len))
    if loaded.keeps_state:
        raise UnsupportedModel(
            f"{architecture.model_class.__name__} cannot draft: it carries recurrent state, of which too "
            "little can be taken back when drafts are rejected."
        )
    return loaded
