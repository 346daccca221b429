"""A model's weights in memory, ready to be run: dtype, device, context length, EOS ids and layers decided."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from config import ModelSettings
from engine.compute import attention
from engine.compute.attention.latent_kv import leave_latents
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.own_attention import built_with
from engine.compute.cuda.coded_choice import NO_KINDS, kept_kinds, multiply_codes
from engine.compute.cuda.weight_rounding import round_linears
from engine.compute.loading.coded_weights import CodeKind
from engine.compute.loading.gguf_model import load_gguf_model
from engine.compute.loading.layer_probe import ProbeResult, prepare_layers, probe_layers
from engine.compute.loading.model_files import (
    check_model_files,
    count_tensors,
    first_line,
    gguf_of,
    read_json,
    read_json_value,
    weight_files,
)
from engine.compute.loading.progress_bars import no_progress_bars, no_remarks
from engine.compute.loading.quantized_files import KeptCodes, keep_codes, unpack_files
from engine.compute.loading.stored_places import StoredPlaces
from engine.compute.loading.support import (
    check_num_layers,
    exact_context_limit,
    find_model_class,
    make_model,
    read_architecture,
    weight_format_of,
    without_padding,
)
from engine.compute.meta_device import on_meta_device
from engine.compute.native.compiler import find_compiler
from engine.compute.native.families import coded_linears, is_known_class
from engine.compute.native.forms import NativeUnavailable, choose_build
from engine.compute.native.team import ComputeTeam
from engine.compute.recurrent.slot_states import LayerState
from engine.compute.recurrent.state_kernel import StateKernel
from engine.compute.runner.device import gpu_has_bfloat16, make_current
from engine.errors import StartRefused
from engine.plan.kv.paged_kv_manager import Rewindable

log = logging.getLogger("slipstream.model")

# Where models that see or hear as well keep their language model's weights, now and in older files.
_TEXT_HALF_NAMES = {
    r"^model\.(language|text)_model\.": "model.",
    r"^(language|text)_model\.model\.": "model.",
    r"^(language|text)_model\.lm_head\.": "lm_head.",
}
# The context length's name, and what MPT and BLOOM call it.
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model on its device, in evaluation mode and without gradients.

    `config` is the text model's own copy. `vocab_size` is the width of the logits, which may exceed the
    tokenizer's. `eos_token_ids` end a request that does not ignore EOS. `layers` has one entry for each
    layer that keeps keys and values, `states` for each that keeps a recurrent state, in order of their
    `layer_idx`; either may be empty, and a layer may have both: `attending` are the `layer_idx` of
    `layers`. `row_attention` attends on a CPU in place of torch, each token by itself, so that drafts and
    crowds change no bit; `kernels` is the same where all attention was replaced to use it. `team` has the
    threads of what else was replaced, too, None where nothing was. `state_kernel` advances recurrent
    states in place of torch. `kernels_used` says in words which kernels compute the model, and why no others.
    Its K/V is kept in `kept_kv`; None is `dtype`.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    layers: tuple[LayerKv, ...]
    states: tuple[LayerState, ...] = ()
    row_attention: attention.RowAttention | None = None
    kernels: attention.RowAttention | None = None
    team: ComputeTeam | None = None
    state_kernel: StateKernel | None = None
    kernels_used: str = ""
    kept_kv: torch.dtype | None = None
    attending: tuple[int, ...] = ()

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are kept in."""
        return self.kept_kv or self.dtype

    @property
    def keeps_state(self) -> bool:
        """Whether anything but K/V is carried from token to token."""
        return bool(self.states)

    @property
    def rewindable(self) -> Rewindable:
        """How far a sequence can be cut back: a state keeps out no more than the drafts of a step."""
        return Rewindable.DRAFTS if self.keeps_state else Rewindable.ANYWHERE


def load_model(directory: Path, settings: ModelSettings) -> LoadedModel:
    """Load the safetensors model in `directory` as `settings` ask.

    No code from the directory runs. Raises StartRefused with one line, UnsupportedModel when the architecture
    would not be served exactly. The device becomes the calling thread's current one.
    """
    check_model_files(directory)
    architecture = read_architecture(directory)
    config = architecture.text_config
    check_num_layers(config, count_tensors(directory))
    device = choose_device(settings.device)
    make_current(device)
    on_kernels = may_use_kernels(architecture.model_class, device, settings)
    dtype = choose_dtype(settings.dtype, stored_dtype(directory, config), device, on_kernels=on_kernels)
    max_model_len = choose_max_model_len(settings.max_model_len, config)
    if (source := gguf_of(directory)) is not None:
        model = load_gguf_model(source, copy.deepcopy(architecture.config), dtype)
        probe = _probe_without_weights(architecture.config, dtype, model)
    else:
        names = _TEXT_HALF_NAMES if architecture.is_text_half else None
        kinds = kept_kinds(device, settings)
        keeping = Keeping(kinds, device, on_kernels and settings.quantization == "none")
        model, places = _load_weights(directory, architecture.config, dtype, names, keeping)
        if not places.fill(model):
            log.info("the weights are unpacked: the model has some of them otherwise than its files")
            model, places = _load_weights(directory, architecture.config, dtype, names)
        if kinds and settings.quantization != "none":
            round_linears(model, settings.quantization, device)
        model = model.to(device)
        multiply_codes(model, dtype)
        if places.modules:
            prepare_layers(model)
            probe = _probe_without_weights(architecture.config, dtype, model)
        else:
            probe = probe_layers(model, model.config.get_text_config(decoder=True))
    return LoadedModel(
        model=model,
        config=model.config.get_text_config(decoder=True),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=probe.vocab_size,
        eos_token_ids=read_eos_token_ids(directory, config),
        layers=probe.layers,
        states=probe.states,
        attending=probe.attending,
    )


def _probe_without_weights(
    config: PreTrainedConfig, dtype: torch.dtype, loaded: PreTrainedModel
) -> ProbeResult:
    """What the layers of the `loaded` model are; stored weights are slow to compute with."""
    config = without_padding(config)

    def probe() -> ProbeResult:
        with torch.device("meta"), no_remarks():
            # The other ways to compute experts want numbers, or 16 bits.
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="batched_mm")
            leave_latents(model, loaded)
            return probe_layers(model.eval(), model.config.get_text_config(decoder=True))

    return on_meta_device(probe)


def choose_device(asked: str) -> torch.device:
    """The device to run on, a GPU with its number; `auto` is the current GPU if there is one.

    Raises StartRefused for a GPU that is not there.
    """
    kind, _, number = asked.partition(":")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartRefused(f"--device {asked}: no CUDA device is available; use auto or cpu.")
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    if index >= count:
        there = (
            f"{count} CUDA devices, cuda:0 to cuda:{count - 1}" if count > 1 else "one CUDA device, cuda:0"
        )
        raise StartRefused(f"--device {asked}: there is no such device; this process sees {there}.")
    return torch.device("cuda", index)


def choose_dtype(
    asked: str, stored: torch.dtype, device: torch.device, *, on_kernels: bool = False
) -> torch.dtype:
    """The dtype to compute in: what is asked for, or for `auto` the stored one if the device is made for it.

    Compiled kernels compute in every dtype, so that a model `on_kernels` keeps its own. Half precision that
    the device lacks becomes the half it has, or float32; the log says so.
    """
    if asked != "auto":
        return _DTYPES[asked]
    if stored is torch.float32 or on_kernels or (device.type == "cuda" and stored is torch.float16):
        return stored
    native = gpu_has_bfloat16(device) if device.type == "cuda" else _cpu_has_bfloat16()
    fallback = torch.float16 if device.type == "cuda" else torch.float32
    chosen = torch.bfloat16 if native else fallback
    if chosen is not stored:
        log.info(
            "the weights are %s, which %s computes slowly or not at all: using %s (--dtype overrides)",
            _name(stored),
            device.type,
            _name(chosen),
        )
    return chosen


def may_use_kernels(model_class: type, device: torch.device, settings: ModelSettings) -> bool:
    """Whether compiled kernels will compute most of a model of that class, as far as one can know before."""
    if device.type != "cpu" or settings.compile == "off" or not is_known_class(model_class):
        return False
    try:
        choose_build(torch.bfloat16, settings.cpu_kernels)
        find_compiler()
    except NativeUnavailable:
        return False
    return True


def own_context_length(config: PreTrainedConfig) -> int | None:
    """The most tokens that the model says it is for; None where it does not say it."""
    found = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((length for length in found if length is not None), None)


def choose_max_model_len(asked: int | None, config: PreTrainedConfig) -> int:
    """The most tokens one sequence may have; None = the model's own. Raises StartRefused for too many."""
    own = own_context_length(config)
    exact = exact_context_limit(config)
    chosen = own if asked is None else asked
    if chosen is None:
        raise StartRefused("The model does not say its context length: give --max-model-len.")
    if chosen < 1:
        raise StartRefused(f"The model's own context is {chosen} tokens ({_CONTEXT_NAMES[0]}).")
    if own is not None and chosen > own:
        raise StartRefused(f"--max-model-len {chosen} is more than the model's own {own} positions.")
    if exact is not None and chosen > exact:
        raise StartRefused(
            f"Beyond {exact} tokens this model's rotary embedding (longrope) would make a request depend on "
            f"its neighbours in the batch: give --max-model-len {exact} or less, not {chosen}."
        )
    return chosen


def read_eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Every id that generation_config.json, config.json or the tokenizer calls the end of a sequence."""
    found: set[int] = set(_ids(config.eos_token_id))
    if (directory / "generation_config.json").is_file():
        found.update(_ids(read_json(directory / "generation_config.json").get("eos_token_id")))
    found.update(_ids(_tokenizer_eos_id(directory)))
    return frozenset(found)


class Keeping(NamedTuple):
    """The kinds of codes that are not unpacked, and the device that they go to.

    With `is_for_kernels` what the CPU's kernels multiply as it is stored stays so.
    """

    kinds: frozenset[CodeKind] = NO_KINDS
    device: torch.device = torch.device("cpu")
    is_for_kernels: bool = False


_NOTHING_KEPT = Keeping()


def _load_weights(
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    names: Mapping[str, str] | None = None,
    keeping: Keeping = _NOTHING_KEPT,
) -> tuple[PreTrainedModel, StoredPlaces]:
    """The model on the CPU under our attention, every weight taken from the files. Raises StartRefused.

    `names` are how expressions in the weights' names are to be changed. Of a quantized one, what codes hold
    stays in codes, and what the CPU's kernels multiply as it is has yet to be put into the places given, as
    `keeping` says.
    """
    attention.register()
    # A copy: setting the attention changes the configuration, which a second model may share.
    own_config = copy.deepcopy(config)
    weight_format = weight_format_of(config)
    if weight_format is None:
        return _from_weights(directory, own_config, dtype, names), StoredPlaces()
    log.info("the weights are stored as %s", weight_format.words(keeping.kinds))
    own_config.quantization_config = None  # what is unpacked must not be quantized by packages of the format
    shapes = _linear_shapes(own_config, dtype) if keeping.kinds else {}
    kept = KeptCodes(shapes, keeping.kinds, keeping.device)
    outline = _outline(own_config, dtype) if keeping.is_for_kernels else None
    unpacked = unpack_files(directory, weight_format, dtype, outline=outline, kept=kept)
    model = _from_weights(directory, own_config, dtype, names, unpacked.tensors)
    if not keep_codes(model, unpacked):
        log.warning("the weights are unpacked: %s changes them as it is loaded", type(model).__name__)
        return _load_weights(directory, config, dtype, names)
    if keeping.kinds and unpacked.expanded:
        log.info("%d projections become numbers of %s", len(unpacked.expanded), _name(dtype))
    return model, unpacked.places


def _from_weights(
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    names: Mapping[str, str] | None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The model of these `tensors`; None takes them from the files. Raises StartRefused."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": directory}
    if tensors is not None:
        source = {"pretrained_model_name_or_path": None, "state_dict": tensors}
    try:
        with no_progress_bars(), no_remarks():
            model, report = on_meta_device(
                lambda: find_model_class(config).from_pretrained(
                    **source,
                    config=config,
                    dtype=dtype,
                    attn_implementation=built_with(find_model_class(config), attention.ATTENTION_NAME),
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    **({} if names is None else {"key_mapping": dict(names)}),
                )
            )
    except Exception as error:  # transformers and its model classes raise whatever they like
        raise StartRefused(f"{directory} cannot be loaded: {first_line(error)}.") from error
    # transformers would go on with random numbers in place of what is missing.
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, report.get(problem) or ())):
            raise misfit(directory, problem, found)
    model.config.use_cache = False
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _outline(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model's shapes."""

    def make() -> PreTrainedModel:
        with torch.device("meta"), no_remarks():
            return make_model(without_padding(config), dtype=dtype)

    return on_meta_device(make)


def _linear_shapes(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Size]:
    """Those of all projections of such a model that are only called; none where it cannot be outlined."""
    try:
        linears = coded_linears(_outline(config, dtype))
    except Exception as error:  # a model's code may do anything with a tensor
        log.info("the weights are unpacked: %s", first_line(error))
        return {}
    return {name: linear.weight.shape for name, linear in linears.items()}


def misfit(directory: Path, problem: str, keys: Sequence[str]) -> StartRefused:
    """What to raise where weights and configuration disagree, by transformers' word for it."""
    return StartRefused(f"{directory} does not fit its configuration: {problem} {', '.join(keys[:3])}.")


def leave_file(model: PreTrainedModel) -> None:
    """Give the input embedding and all vectors, which no kernel packs, memory of their own.

    Weights lie in their file's memory, which is given back with the last of them.
    """
    for parameter in model.parameters():
        if _is_never_packed(parameter, model):
            parameter.data = parameter.data.clone()


def leave_file_wholly(model: PreTrainedModel) -> None:
    """The same for all that is left once kernels have packed theirs: a router's weights hold a whole file."""
    for parameter in model.parameters():
        if not _is_never_packed(parameter, model):
            parameter.data = parameter.data.clone()


def _is_never_packed(parameter: torch.nn.Parameter, model: PreTrainedModel) -> bool:
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return parameter is embedding or parameter.dim() == 1


def stored_dtype(directory: Path, config: PreTrainedConfig) -> torch.dtype:
    """The dtype the configuration names, else that of the first floating-point tensor, else float32."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    with safe_open(weight_files(directory)[0], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if stored := _STORED_DTYPES.get(file.get_slice(name).get_dtype()):
                return stored
    return torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively; without, float32 is faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _tokenizer_eos_id(directory: Path) -> int | None:
    """The id of the token that tokenizer_config.json names as EOS; None if there is none."""
    path = directory / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is None or not (directory / "tokenizer.json").is_file():
        return None
    added = read_json_value(directory / "tokenizer.json", "added_tokens") or ()
    return next((entry["id"] for entry in added if entry.get("content") == token), None)


def _ids(value: Any) -> list[int]:
    """The token ids in a setting that may be missing, one id or a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, int) and item >= 0]


def _name(dtype: torch.dtype) -> str:
    """The dtype as the settings spell it."""
    return str(dtype).removeprefix("torch.")
