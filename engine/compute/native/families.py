"""Which model families' own code was read, and what of it the kernels compute the same way.

A module of another family that looks alike may clamp, scale by position or read another module's weights,
none of which a comparison of outputs needs to show. tests/unit/compute/native/test_families.py holds the
installed transformers to what is said here.
"""

from __future__ import annotations

from torch import nn

# Attention, gated MLP and norm are Llama's, with norms of single heads where Qwen3 has them.
WHOLE = frozenset(
    {"granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"},
)
# Their layers do nothing else than norm, attend, norm, transform, each half added to what it was given, and
# nothing comes between them.
PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Theirs are not, but their projections are plain modules that are only ever called.
PROJECTIONS = frozenset(
    {
        *("cohere", "cohere2", "gemma", "gemma2", "gemma3", "glm", "glm4", "gpt_neox", "granitemoe"),
        *("olmo2", "olmo3", "phi", "phi3", "smollm3", "stablelm", "starcoder2"),
    }
)


def is_known(model: nn.Module) -> bool:
    """True for a model whose projections at least may be replaced."""
    return is_known_class(type(model))


def is_known_class(model_class: type) -> bool:
    """The same of a model that is not there yet."""
    return _family(model_class) in WHOLE | PROJECTIONS


def is_whole(module: nn.Module, kind: str) -> bool:
    """True for an `Attention`, `MLP` or `RMSNorm` (`kind`) that is one of those read."""
    return _family(type(module)) in WHOLE and type(module).__name__.endswith(kind)


def is_plain(module: nn.Module, kind: str) -> bool:
    """True for a `Model` or `DecoderLayer` (`kind`) that does nothing but what its parts do."""
    return _family(type(module)) in PLAIN and type(module).__name__.endswith(kind)


def _family(module_class: type) -> str | None:
    """The family whose file in transformers defines a module's class; None for all other classes."""
    family = module_class.__module__.rpartition(".modeling_")[2]
    is_theirs = module_class.__module__ == f"transformers.models.{family}.modeling_{family}"
    return family if is_theirs else None
