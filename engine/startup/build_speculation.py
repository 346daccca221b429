"""The draft sources and the decoder, made from settings: the half of `build` for speculation."""

from __future__ import annotations

from pathlib import Path

import torch

from config import ModelSettings, Settings, SpeculationSettings
from config.speculative_config import DraftTuning
from engine.compute.cuda.layer_choice import quick_layer
from engine.compute.cuda.round_choice import fastest_steps
from engine.compute.drafters.draft_loader import TargetRoom, is_on_host, load_draft_model
from engine.compute.drafters.eagle import LEAST_CHANCE, EagleDrafter
from engine.compute.drafters.eagle_loader import (
    MOST_DRAFTS,
    EagleRoom,
    load_eagle_drafter,
    shipped_heads,
)
from engine.compute.drafters.layer_chains import LayerChains
from engine.compute.drafters.medusa import load_medusa
from engine.compute.drafters.model_free import ModelFreeDrafter
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.mtp_layouts import MtpLayout, find_mtp
from engine.compute.drafters.mtp_loader import load_mtp_drafter
from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.drafters.ngram import NgramDrafter
from engine.compute.drafters.prediction import PredictionDrafter
from engine.compute.drafters.suffix import SuffixDrafter
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.eagle import NativeEagle
from engine.compute.native.kernels import NativeKernels
from engine.compute.runner.layer_taps import can_tap
from engine.errors import StartRefused
from engine.plan.kv.paged_kv_manager import PagedKvManager, Rewindable
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.startup.host_memory import memory_bytes

# The longest draft where the settings leave it open.
MODEL_FREE_TOKENS, MODEL_TOKENS, HEADS_TOKENS = 32, 4, 6
_DRAFT_MODELS = ("auto", "draft-model")  # methods
# What heads keep of sequences may take this part of the target's K/V.
_HEADS_KV_SHARE = 0.1


def load_sources(
    settings: Settings, target: LoadedModel, directory: Path, room: TargetRoom
) -> tuple[DraftSource, ...]:
    """Make and load what `--speculative-method` asks for, the most trusted first. Raises StartRefused.

    `directory` and `room` are the target's; drafters' own K/V takes a share of as much beside it.
    """
    speculation = settings.speculation
    method, asked = speculation.speculative_method, speculation.num_speculative_tokens
    if method == "none":
        return ()
    if method == "auto" and speculation.medusa_heads is not None and speculation.draft_heads is not None:
        raise StartRefused("--medusa-heads and --draft-heads: one of them can read the model. Leave one out.")
    sources = model_free_sources(speculation)
    if method in _DRAFT_MODELS and speculation.draft_model is not None:
        own = draft_model_room(settings, target, room)
        model = load_draft_model(settings, target, directory, own)
        sources.append(DraftSource(model, asked or MODEL_TOKENS, max_num_lanes=model.max_num_lanes))
    if method in ("auto", "medusa") and speculation.medusa_heads is not None:
        if target.keeps_state:
            raise StartRefused(
                "--medusa-heads: a recurrent model verifies chains of drafts, and these heads make trees."
            )
        medusa = load_medusa(speculation.medusa_heads, target, speculation.draft_verification)
        sources.append(DraftSource(medusa, asked or medusa.num_nodes))
    elif method in ("auto", "heads") and (heads := find_heads(speculation, target)) is not None:
        if not can_tap(target.model.base_model):
            raise StartRefused(
                f"--draft-heads: {target.config.model_type} has not one list of layers with a row a token."
            )
        eagle = load_eagle_drafter(heads, target, eagle_room(room), speculation.draft_verification)
        sources.append(_reading(eagle, asked))
    elif method in ("auto", "mtp") and (layout := find_module(speculation, target, directory)) is not None:
        mtp = load_mtp_drafter(directory, target, layout, eagle_room(room), speculation.draft_verification)
        sources.append(_reading(mtp, asked))
    return tuple(sources)


def draft_model_room(settings: Settings, target: LoadedModel, room: TargetRoom) -> TargetRoom:
    """What a draft model takes a share of: on the CPU beside a GPU no more than the host has free."""
    host = memory_bytes() if is_on_host(settings, target) else None
    return room if host is None else room._replace(kv_bytes=min(room.kv_bytes, host[1]))


def told_bytes(settings: Settings, target: LoadedModel, num_seqs: int) -> int:
    """The most that so many sequences hold beside the target of what a draft model's drafts were drawn from.

    Under `match` it is not told. Else each draft of a tape has a number of 32 bits for each token: those that
    are being verified, up to the longest draft, and as many and one more that are made meanwhile.
    """
    speculation = settings.speculation
    is_drafting = speculation.draft_model is not None and speculation.speculative_method in _DRAFT_MODELS
    if not is_drafting or speculation.draft_verification == "match" or is_on_host(settings, target):
        return 0
    longest = speculation.num_speculative_tokens or MODEL_TOKENS
    return num_seqs * (2 * longest + 1) * target.vocab_size * torch.float32.itemsize


def eagle_room(room: TargetRoom) -> EagleRoom:
    """What a drafter of one layer may keep of sequences beside a target with such room."""
    return EagleRoom(room.max_num_seqs, int(room.kv_bytes * _HEADS_KV_SHARE))


def _reading(drafter: EagleDrafter, asked: int | None) -> DraftSource:
    """A drafter of one layer as a source."""
    longest = min(asked or HEADS_TOKENS, MOST_DRAFTS)
    return DraftSource(drafter, longest, True, drafter.feature_layers, drafter.kv.window)


def model_free_sources(speculation: SpeculationSettings) -> list[DraftSource]:
    """Those of `load_sources` that need no weights."""
    method, longest = speculation.speculative_method, speculation.num_speculative_tokens or MODEL_FREE_TOKENS
    if method == "none":
        return []
    is_auto = method == "auto"
    sources = [DraftSource(ModelFreeDrafter(), longest)] if is_auto else []
    sources.append(DraftSource(PredictionDrafter(), longest, unasked=not is_auto))
    if method in ("auto", "suffix"):
        sources.append(DraftSource(SuffixDrafter(), longest, unasked=not is_auto))
    if method in ("auto", "ngram"):
        sources.append(DraftSource(_ngram(speculation.tuning), longest, unasked=not is_auto))
    return sources


def use_kernels(
    sources: tuple[DraftSource, ...], target: LoadedModel, settings: ModelSettings, block_size: int
) -> None:
    """Have a drafter of one layer compute with what the target computes with, as far as it can.

    On a GPU its rounds are recorded.
    """
    kernels = target.kernels
    for drafter in (source.drafter for source in sources):
        if not isinstance(drafter, EagleDrafter):
            continue
        if isinstance(drafter.weights, MtpModule):
            drafter.weights.follow(target)
        elif isinstance(kernels, NativeKernels) and NativeEagle.fits(drafter.weights, kernels):
            drafter.compute = NativeEagle(drafter.weights, kernels, drafter.kv, LEAST_CHANCE)
        if isinstance(chains := drafter.compute, LayerChains):
            width = len(drafter.feature_layers) * int(target.config.hidden_size)
            make_quick = quick_layer(drafter.weights, target, settings, block_size)
            chains.steps = fastest_steps(chains.steps, drafter.kv, width, make_quick)
            if isinstance(layer := chains.steps.layer, MtpLayer):
                drafter.weights = layer.module  # and what was replaced in it is freed


def find_heads(speculation: SpeculationSettings, target: LoadedModel) -> Path | None:
    """The directory of the EAGLE-3 drafter to use, given or the model's own. Raises StartRefused."""
    if speculation.draft_heads is not None:
        return speculation.draft_heads
    own = shipped_heads(target)
    if own is None and speculation.speculative_method == "heads":
        raise StartRefused("--speculative-method heads: none come with this model; give --draft-heads.")
    return own


def find_module(
    speculation: SpeculationSettings, target: LoadedModel, directory: Path | None
) -> MtpLayout | None:
    """How the MTP module in the model's own files is laid out; None without one. Raises StartRefused."""
    found = None if directory is None else find_mtp(directory, target.config)
    if found is None and speculation.speculative_method == "mtp":
        raise StartRefused("--speculative-method mtp: this model's files have no MTP module that is known.")
    return found


def make_decoder(
    settings: Settings, sources: tuple[DraftSource, ...], vocab_size: int, kv: PagedKvManager
) -> SpeculativeDecoder | None:
    """The decoder over these sources; None without any."""
    if not sources:
        return None
    speculation = settings.speculation
    config = SpeculationConfig(
        vocab_size=vocab_size,
        max_draft_tokens=max_draft_tokens(sources),
        schedule=speculation.speculation_schedule,
        verification=speculation.draft_verification,
        length_policy=speculation.draft_length_policy,
        min_acceptance_rate=speculation.min_acceptance_rate,
        draft_shrink_rate=speculation.draft_shrink_rate,
    )
    costs = PassCosts()
    policy = make_length_policy(config, costs)
    return SpeculativeDecoder(
        config, sources, policy, costs, can_rewind=kv.rewindable is not Rewindable.NEVER
    )


def max_draft_tokens(sources: tuple[DraftSource, ...]) -> int:
    """The most drafts of one request that a step verifies."""
    return max((source.max_tokens for source in sources), default=0)


def feature_layers(sources: tuple[DraftSource, ...]) -> tuple[int, ...]:
    """The layers of the target that a drafter reads; none where none does, or only what the head reads."""
    return next((source.feature_layers for source in sources if source.feature_layers), ())


def foreseen_draft_tokens(settings: Settings) -> int:
    """As many as `max_draft_tokens`, or more, of settings whose drafters are not loaded yet."""
    speculation = settings.speculation
    if speculation.speculative_method == "none":
        return 0
    return speculation.num_speculative_tokens or MODEL_FREE_TOKENS


def draft_methods(sources: tuple[DraftSource, ...]) -> tuple[str, ...]:
    """What a request may name."""
    methods = (source.drafter.method for source in sources)
    return tuple(method for method in methods if method != ModelFreeDrafter.method)


def _ngram(tuning: DraftTuning) -> NgramDrafter:
    given = {"min_match": tuning.prompt_lookup_min, "max_match": tuning.prompt_lookup_max}
    return NgramDrafter(**{name: value for name, value in given.items() if value is not None})
