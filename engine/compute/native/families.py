"""Which model families' own code was read, and what of it the kernels compute the same way.

A module of another family that looks alike may clamp, scale by position or read another module's weights,
none of which a comparison of outputs needs to show. tests/unit/compute/native/test_families.py holds the
installed transformers to what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from engine.compute.native.records import NormKind


class Pairing(Enum):
    """Which two numbers are rotated together: none, one of each half, or neighbours.

    These then lie in halves where a configuration has them `rope_interleave`, and else are a number of each.
    """

    NONE = auto()
    HALVES = auto()
    NEIGHBOURS = auto()
    AS_CONFIGURED = auto()


def _always(_attention: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a family computes and its modules do not show; by default what Llama's does.

    With `rotates_at_once` a rotated number is rounded once. With `rotates_pairs` neighbours are rotated
    together and not halves, and with `has_paired_angles` angles come in that order; with `has_half_angles`
    those of the second half are not given again. `rotates` is true for an attention that rotates heads by
    their positions at all.

    A layer does nothing else than norm, attend, norm and transform, in one of the orders of `layer_form`,
    each half added to what it was given, and nothing comes between layers. What is added is multiplied with a
    layer's `residual_multiplier`, what is embedded with a model's `embedding_multiplier`, where there is one.
    Gemma 4's may do more: what `layer_form` says of them.
    """

    norm: NormKind = NormKind.ROUNDED
    rotates_at_once: bool = False
    rotates_pairs: bool = False
    has_paired_angles: bool = False
    has_half_angles: bool = False
    rotates: Callable[[Any], bool] = _always


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a layer calls its norms, by their places; empty where it has none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""

    def __iter__(self) -> Iterator[str]:
        """Those there are."""
        return filter(None, astuple(self))

    @property
    def are_for_both(self) -> bool:
        """True where attention and MLP read the same: what a single norm gives."""
        return tuple(self) == (self.before_attention,)


# Which norms a layer has says where they stand: no two families give other places to the same names.
NORM_NAMES = (
    NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    NormNames(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
    NormNames(before_attention="input_layernorm"),  # read by both halves
    NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
)

FAMILIES: dict[str, Family] = {
    "cohere2": Family(
        norm=NormKind.CENTRED,
        rotates_at_once=True,
        rotates_pairs=True,
        has_paired_angles=True,
        rotates=lambda attention: attention.sliding_window is not None,
    ),
    "exaone4": Family(rotates=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "gemma": Family(norm=NormKind.ONE_MORE),
    "gemma2": Family(norm=NormKind.ONE_MORE),
    "gemma3": Family(norm=NormKind.ONE_MORE),
    "gemma4": Family(norm=NormKind.AT_ONCE),
    "gemma4_unified": Family(norm=NormKind.AT_ONCE),
    "glm": Family(rotates_pairs=True),
    "glm4": Family(rotates_pairs=True),
    "gpt_oss": Family(norm=NormKind.AT_ONCE, has_half_angles=True),
    "granite": Family(),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "olmo2": Family(norm=NormKind.AT_ONCE, rotates_at_once=True),
    "olmo3": Family(norm=NormKind.AT_ONCE, rotates_at_once=True),
    "olmoe": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "seed_oss": Family(),
    "smollm3": Family(rotates=lambda attention: bool(attention.use_rope)),
    "starcoder2": Family(norm=NormKind.CENTRED),
}
# Of these, projections are plain modules that are only ever called.
PROJECTIONS = frozenset(
    {
        "apertus",
        "arcee",
        "aria",
        "bamba",
        "biogpt",
        "bitnet",
        "codegen",
        "cohere",
        "cohere_compass",
        "cwm",
        "diffllama",
        "doge",
        "emu3",
        "ernie4_5",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "fuyu",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "gptj",
        "granite_swa",
        "helium",
        "hrm_text",
        "hunyuan_v1_dense",
        "hyperclovax",
        "jais2",
        "jetmoe",
        "lfm2",
        "lfm3",
        "llama4",
        "mamba",
        "mamba2",
        "minicpm3",
        "minimax_m3_vl",
        "ministral3",
        "mllama",
        "modernbert_decoder",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo_hybrid",
        "opt",
        "persimmon",
        "phi",
        "qwen3_5",
        "recurrent_gemma",
        "stablelm",
        "vaultgemma",
        "xglm",
        "youtu",
        "zamba",
        "zamba2",
    }
)
_EXPANDS = ".kv_b_proj"
# Projections whose weights our recurrent layers read; they stay.
READ = frozenset({"dt_proj", "v_proj_delayed"})
# Of these too, and experts are called with rows, with those that each row goes through and their shares.
EXPERTS = frozenset(
    {
        "afmoe",
        "axk1",
        "bailing_hybrid",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma4",
        "glm4_moe",
        "glm4_moe_lite",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "jamba",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2_moe",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "solar_open",
        "zaya",
    }
)
# The same without gates.
UNGATED_EXPERTS = frozenset({"nemotron_h"})
# The same, but with biases and limits; of gate and up their outputs take turns.
LIMITED_EXPERTS = frozenset({"gpt_oss"})
# And in these the likeliest by a softmax over all are chosen, with their chances, normed or not, for shares.
ROUTERS = frozenset(
    {
        "flex_olmo",
        "gpt_oss",
        "mellum",
        "minimax",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
    }
)
_ROUTERS_OF_FLOATS = frozenset({"minimax", "mixtral"})  # whose shares are not rounded
# The same, but the logits that they tell are float32's.
ROUTERS_TELLING_FLOATS = frozenset({"granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"})
# The same in float32, where none are chosen by groups; shares are chances times a factor.
ROUTERS_IN_FLOATS = frozenset({"deepseek_v2"})
# And in these those whose sigmoid and bias are highest, of the groups whose two highest sum to most.
GROUPED_ROUTERS = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "deepseek_v3",
        "dots1",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "kimi_linear",
        "mimo_v2_flash",
        "nemotron_h",
        "solar_open",
    }
)
# Attentions that store a latent row, and how their code pairs the numbers that it rotates.
LATENT_ATTENTIONS = {
    "DeepseekV2Attention": Pairing.NEIGHBOURS,
    "DeepseekV3Attention": Pairing.AS_CONFIGURED,
    "Glm4MoeLiteAttention": Pairing.AS_CONFIGURED,
    "KimiLinearAttention": Pairing.NONE,
    "MiniCPM3Attention": Pairing.HALVES,
    "YoutuAttention": Pairing.AS_CONFIGURED,
}
# And these do no more than add what a shared expert makes of a row, where there is one.
MIXTURES = frozenset({"flex_olmo", "gpt_oss", "mellum", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


def is_known(model: nn.Module) -> bool:
    """True for a model whose projections at least may be replaced."""
    return is_known_class(type(model))


def called_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every plain projection that the code of a model only calls, by name; none where it was not read."""
    if not is_known(model):
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] not in READ
    }


def coded_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of `called_linears` that may multiply with codes on a device.

    Not what latent rows are expanded by: kept as numbers, its halves meet queries and what was attended to,
    and a token costs its row in place of the keys and values of all heads.
    """
    return {name: linear for name, linear in called_linears(model).items() if not name.endswith(_EXPANDS)}


def is_known_class(model_class: type) -> bool:
    """The same of a model that is not there yet."""
    name = _name_of(model_class)
    return name in FAMILIES or name in PROJECTIONS or name in EXPERTS


def family_of(module: nn.Module) -> Family | None:
    """What is known of the code of an attention, MLP, norm, layer or model; None where it was not read."""
    return FAMILIES.get(_name_of(type(module)) or "")


def is_whole(module: nn.Module, kind: str) -> bool:
    """True for a `Norm`, `Attention`, `MLP`, `DecoderLayer` or `Model` (`kind`) that is one of those read."""
    return family_of(module) is not None and type(module).__name__.endswith(kind)


def latent_pairing(module: nn.Module) -> Pairing | None:
    """How an attention over latent rows rotates; None for one whose code was not read."""
    return None if _name_of(type(module)) is None else LATENT_ATTENTIONS.get(type(module).__name__)


def is_around_latent_attention(layer: nn.Module) -> bool:
    """True for a layer of these: norm, attention, sum, norm, MLP, sum."""
    family, _, rest = type(layer).__name__.rpartition("DecoderLayer")
    return not rest and _name_of(type(layer)) is not None and f"{family}Attention" in LATENT_ATTENTIONS


def has_read_experts(module: nn.Module) -> bool:
    """True for all experts of a layer, whose code was read."""
    names = EXPERTS | UNGATED_EXPERTS | LIMITED_EXPERTS
    return _name_of(type(module)) in names and type(module).__name__.endswith("Experts")


def has_limited_experts(module: nn.Module) -> bool:
    """True for those of them with biases and limits."""
    return has_read_experts(module) and _name_of(type(module)) in LIMITED_EXPERTS


def has_ungated_experts(module: nn.Module) -> bool:
    """True for those of them that are down(activation(up(x)))."""
    return has_read_experts(module) and _name_of(type(module)) in UNGATED_EXPERTS


def weights_of_experts(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What such experts multiply with first, [count, outputs, hidden], and then, [count, hidden, width].

    The outputs are `width` without gates, else twice as many: gates before ups, by turns with limits.
    """
    if has_ungated_experts(module):
        return module.up_proj, module.down_proj
    if has_limited_experts(module):
        return module.gate_up_proj.mT, module.down_proj.mT
    return module.gate_up_proj, module.down_proj


def has_shapes_of_experts(module: Any, dtype: torch.dtype) -> bool:
    """True when both of these weights are of that type, and as many and as wide as the code multiplies."""
    first, down = weights_of_experts(module)
    count, hidden, width = down.shape
    outputs = width if has_ungated_experts(module) else 2 * width
    return first.dtype is down.dtype is dtype and first.shape == (count, outputs, hidden)


def has_read_router(module: nn.Module) -> bool:
    """True for what chooses experts for rows, whose code was read."""
    return _name_of(type(module)) in ROUTERS and type(module).__name__.endswith("Router")


def has_plain_router(module: nn.Module) -> bool:
    """The same, whatever logits it tells."""
    is_router = _name_of(type(module)) in ROUTERS_TELLING_FLOATS and type(module).__name__.endswith("Router")
    return is_router or has_read_router(module)


def has_float_router(module: Any) -> bool:
    """True for what chooses experts for rows in float32, by no groups, whose code was read."""
    is_router = _name_of(type(module)) in ROUTERS_IN_FLOATS and type(module).__name__.endswith("TopkRouter")
    return is_router and module.topk_method == "greedy"


def has_grouped_router(module: nn.Module) -> bool:
    """True for what chooses experts for rows by groups of them, whose code was read."""
    return _name_of(type(module)) in GROUPED_ROUTERS and type(module).__name__.endswith("TopkRouter")


def rounds_shares(router: nn.Module) -> bool:
    """True for one of them whose shares are of the model's type, not float32."""
    return _name_of(type(router)) not in _ROUTERS_OF_FLOATS


def is_read_mixture(module: nn.Module) -> bool:
    """True for a router with its experts, whose code was read."""
    return _name_of(type(module)) in MIXTURES and type(module).__name__.endswith(("SparseMoeBlock", "MLP"))


def _name_of(module_class: type) -> str | None:
    """The family whose file in transformers defines a module's class; None for all other classes."""
    family = module_class.__module__.rpartition(".modeling_")[2]
    is_theirs = module_class.__module__ == f"transformers.models.{family}.modeling_{family}"
    return family if is_theirs else None
