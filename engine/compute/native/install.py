"""Puts our modules into a loaded model wherever they give what the model's own give."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from config import ModelSettings
from engine.compute.attention import CpuAttention
from engine.compute.loading.coded_weights import code_kinds
from engine.compute.loading.loader import LoadedModel, leave_file, leave_file_wholly
from engine.compute.native.compiler import find_compiler, find_library, library
from engine.compute.native.decoder import NativeDecoder, gives_head_alone
from engine.compute.native.families import is_known, is_whole
from engine.compute.native.forms import KernelBuild, NativeUnavailable, choose_build
from engine.compute.native.kernels import NativeKernels, can_attend
from engine.compute.native.mixture import NativeMixture
from engine.compute.native.modules import NativeActivation, activation_of
from engine.compute.native.observation import observe
from engine.compute.native.places import Place, find_places
from engine.compute.native.quantization import quantize, unquantized
from engine.compute.native.replacement import make_equal, names_to_observe
from engine.compute.native.router import NativeScaledRouter
from engine.compute.native.scratch import attention_bytes, foreseen_bytes
from engine.compute.native.state_scans import NativeScans
from engine.compute.native.steady_products import keep_rows
from engine.compute.native.stored import kernels_of
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import check_forward, packed_difference, packed_sample, plain_sample
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")


class LogitsChanged(Exception):
    """Modules that each answer alike make a model that does not; the message says by how much."""


def with_checked_kernels(
    loaded: LoadedModel,
    settings: ModelSettings,
    home: Path,
    reload: Callable[[], LoadedModel],
    block_size: int,
) -> LoadedModel:
    """As `with_kernels` and `check_forward`: what will be served answers as transformers does.

    Where the kernels compute, one comparison shows both. Raises UnsupportedModel besides.
    """
    if loaded.device.type != "cpu" or settings.compile == "off" or kernels_of(loaded.model) is not None:
        sample = check_forward(forward_of(loaded), block_size)
        return with_kernels(loaded, settings, home, reload, sample)
    served = with_kernels(loaded, settings, home, reload, plain_sample(forward_of(loaded)))
    if served.team is None:
        check_forward(forward_of(served), block_size)
    return served


def with_kernels(
    loaded: LoadedModel,
    settings: ModelSettings,
    home: Path,
    reload: Callable[[], LoadedModel],
    sample: torch.Tensor | None = None,
) -> LoadedModel:
    """The model with our modules in it, as the settings ask; the log says what became of it.

    `loaded` itself is changed: use what is returned. `reload` gives it anew, for when the changed one turns
    out to be of no use. `sample` is the model's `packed_sample`, or `plain_sample`; None where it is yet to
    be computed. Raises StartRefused if what is insisted on cannot be had.
    """
    if settings.compile == "off":
        return replace(loaded, kernels_used="torch's (--compile off)")
    try:
        build = usable_build(loaded, settings.cpu_kernels)
        build = replace(build, formats=build.formats or settings.quantization == "int4")
        kernels_of_stored = kernels_of(loaded.model)
        kernels = kernels_of_stored or NativeKernels(library(home, build), build.dtype)
        leave_file(loaded.model)
        loaded, sample = _install(loaded, kernels, sample)
        leave_file_wholly(loaded.model)
        if settings.quantization != "none":
            if kernels_of_stored is not None:
                raise unquantized("the weights are quantized already", settings.quantization)
            quantize(loaded, kernels, settings.quantization)
            sample = None
        join_layers(loaded, kernels, sample)
        return replace(loaded, kernels_used=f"compiled for this CPU ({build.form.name})")
    except NativeUnavailable as reason:
        # A device that multiplies with codes has rounded weights to them as they were loaded.
        if settings.quantization == "none" or not code_kinds(loaded.model):
            refuse_without(settings, reason)
        log.debug("compiled kernels are not used: %s", reason)
        used = "for CUDA" if loaded.device.type == "cuda" else f"torch's, since {reason}"
        if kinds := code_kinds(loaded.model):
            used += f", weights as {' and '.join(kinds)}"
        return replace(loaded, kernels_used=used)
    except LogitsChanged as reason:
        refuse_without(settings, f"the kernels change the logits {reason}")
        log.warning("compiled kernels are not used: they change the logits %s", reason)
        return replace(reload(), kernels_used="torch's, since compiled ones change the logits")


def refuse_without(settings: ModelSettings, reason: object) -> None:
    """Raise StartRefused, for `reason`, where kernels that cannot be had are insisted on."""
    if settings.quantization != "none":
        raise unquantized(f"no compiled kernels: {reason}", settings.quantization)
    if settings.compile == "on":
        raise StartRefused(f"--compile on: {reason}. Leave it out to do without.")


def usable_build(loaded: LoadedModel, asked: str) -> KernelBuild:
    """The kernels that a model like this can run on, of the form `asked`; its weights are not needed.

    Raises NativeUnavailable.
    """
    if loaded.device.type != "cpu":
        raise NativeUnavailable(f"they are for CPUs, the model is on {loaded.device}")
    if not is_known(loaded.model):
        raise NativeUnavailable(f"{type(loaded.model).__name__} is not among the models they were made for")
    return choose_build(loaded.dtype, asked, formats=loaded.kept_kv is torch.int8)


def foresee(outline: LoadedModel, home: Path, asked: str, *, formats: bool = False) -> str:
    """What a start would use the kernels for, in words; with `formats`, for weights of few bits.

    Compiles nothing. Raises NativeUnavailable.
    """
    build = usable_build(outline, asked)
    build = replace(build, formats=build.formats or formats)
    is_ready = find_library(home, build) is not None
    if not is_ready:
        find_compiler()
    count = Counter(place.name_of_kind for place in find_places(outline.model, outline.dtype))
    if not count:
        raise _nothing_to_do(outline)
    later = "" if is_ready else "; the first start compiles them, in a few seconds"
    return f"{build.form.name}: {_listed(count)}{later}"


def foresee_scratch(outline: LoadedModel, num_threads: int, num_tokens: int) -> int:
    """The most bytes that the kernels would work in for steps of so many tokens, where they attend."""
    places = find_places(outline.model, outline.dtype)
    if 0 < sum(place.name_of_kind == Place.ATTENTION for place in places) == len(outline.layers):
        return foreseen_bytes(outline, num_threads, num_tokens)
    return attention_bytes(outline.layers, num_threads) if places and attends(outline) else 0


def install(loaded: LoadedModel, kernels: NativeKernels) -> LoadedModel:
    """Replace each module that answers alike, freeing its weights, then compare the logits with those before.

    Raises NativeUnavailable when nothing was replaced and LogitsChanged when the model is of no use any more.
    """
    return _install(loaded, kernels, None)[0]


def _install(
    loaded: LoadedModel, kernels: NativeKernels, before: torch.Tensor | None
) -> tuple[LoadedModel, torch.Tensor]:
    """As `install`, with the logits before where they are known and those after."""
    before = packed_sample(forward_of(loaded)) if before is None else before
    places = find_places(loaded.model, loaded.dtype)
    has_blocks = kernels_of(loaded.model) is not None
    count = _replace_all(loaded, places, kernels)
    if not count and not has_blocks:
        raise _nothing_to_do(loaded)
    if 0 < count[Place.ATTENTION] == len(loaded.layers):
        loaded = replace(loaded, kernels=kernels, row_attention=kernels)
    elif attends(loaded):
        loaded = replace(loaded, row_attention=kernels)
    loaded = replace(loaded, team=kernels.team, state_kernel=NativeScans(kernels))
    if num_kept := keep_rows(loaded.model):
        log.debug("torch's routers and narrow linears multiply by blocks of rows: %d", num_kept)
    after = packed_sample(forward_of(loaded))
    difference = packed_difference(after, before, loaded.dtype, has_blocks)
    if difference is not None:
        raise LogitsChanged(difference)
    log.debug("compiled kernels compute %s", _listed(count))
    return loaded, after


def attends(loaded: LoadedModel) -> bool:
    """Whether the kernels can attend for every layer, whatever computes its projections."""
    try:
        num_heads = loaded.config.num_attention_heads
    except (AttributeError, RuntimeError):  # it has another name, or each layer has a number of its own
        return False
    shapes = loaded.layers
    return bool(shapes) and isinstance(num_heads, int) and all(can_attend(each, num_heads) for each in shapes)


def join_layers(loaded: LoadedModel, kernels: NativeKernels, before: torch.Tensor | None = None) -> None:
    """Have one call compute each mixture, and one all layers where that gives the same bits as each alone.

    `before` is the model's `packed_sample`, None where it is yet to be computed. After it, weights must stay
    where they are. Raises LogitsChanged where calls for parts of layers change them.
    """
    before = _stand_in(loaded, kernels, before)
    base = loaded.model.base_model
    if loaded.kernels is None or not NativeDecoder.fits(base):
        return
    before = packed_sample(forward_of(loaded)) if before is None else before
    decoder = NativeDecoder(kernels, base, loaded.layers)
    loaded.model.set_submodule(loaded.model.base_model_prefix, decoder)
    if gives_head_alone(loaded.model):
        decoder.lead_to(loaded.model.get_output_embeddings())
    if torch.equal(packed_sample(forward_of(loaded)), before):
        log.debug("one call of a kernel computes all layers")
        return
    loaded.model.set_submodule(loaded.model.base_model_prefix, base)
    log.warning("one call for all layers changes the logits: they are computed one by one")


def _stand_in(
    loaded: LoadedModel, kernels: NativeKernels, before: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Put those of our modules in that are made of others of ours, or stand among these.

    The model's `packed_sample` then, where it is known.
    """
    found = {
        name: made
        for name, module in loaded.model.named_modules()
        if (made := _made_of_ours(loaded, name, module, kernels)) is not None
    }
    if not found:
        return before
    before = packed_sample(forward_of(loaded)) if before is None else before
    for name, made in found.items():
        loaded.model.set_submodule(name, made)
    after = packed_sample(forward_of(loaded))
    difference = packed_difference(after, before, loaded.dtype, has_blocks=False)
    if difference is not None:
        raise LogitsChanged(difference)
    log.debug("compiled kernels compute %d mixtures, routers or activations in one call each", len(found))
    return after


def _made_of_ours(
    loaded: LoadedModel, name: str, module: nn.Module, kernels: NativeKernels
) -> nn.Module | None:
    if NativeMixture.fits(module):
        return NativeMixture(kernels, module)
    if NativeScaledRouter.fits(module):
        return NativeScaledRouter(kernels, module)
    layer, _, own_name = name.rpartition(".")
    if own_name == "act_fn" and is_whole(loaded.model.get_submodule(layer), "DecoderLayer"):
        activation = activation_of(module)
        return None if activation is None else NativeActivation(kernels, activation)
    return None


@torch.inference_mode()
def _replace_all(loaded: LoadedModel, places: list[Place], kernels: NativeKernels) -> Counter[str]:
    """How many of each kind were replaced. What answers otherwise stays, and the log says so."""
    count: Counter[str] = Counter()
    observation = observe(loaded, list(names_to_observe(loaded.model, places)))
    context = observation.context(CpuAttention(kernels))
    for place in places:
        made = make_equal(loaded.model.get_submodule(place.name), place, observation, context, kernels)
        if made is None:
            log.debug("%s answers otherwise than compiled kernels: the module stays", place.name)
            continue
        loaded.model.set_submodule(place.name, made)
        count[place.name_of_kind] += 1
    return count


def _nothing_to_do(loaded: LoadedModel) -> NativeUnavailable:
    return NativeUnavailable(f"{type(loaded.model).__name__} has no module that they could compute")


def _listed(count: Counter[str]) -> str:
    named = sorted(count.items())
    return ", ".join(f"{number} {name if number > 1 else name.removesuffix('s')}" for name, number in named)
