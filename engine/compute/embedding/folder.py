"""What the files of an embedding model say: its parts as sentence-transformers has them, prompts, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.compute.loading.model_files import first_line, holds, read_config, read_json
from engine.errors import StartRefused, UnsupportedModel

MODULES_FILE = "modules.json"
CLASSIFIER = "ForSequenceClassification"
# Pooling modes, as older configurations name their switches and newer ones the mode itself.
_MODES = {
    "cls": ("pooling_mode_cls_token",),
    "max": ("pooling_mode_max_tokens",),
    "mean": ("pooling_mode_mean_tokens",),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens",),
    "weightedmean": ("pooling_mode_weightedmean_tokens",),
    "lasttoken": ("pooling_mode_lasttoken",),
}
_HEADS = ("Dense", "LayerNorm", "Normalize")
_IDLE = ("Dropout",)  # does nothing outside training


@dataclass(frozen=True, slots=True)
class HeadModule:
    """A module behind the pooling: its class in sentence-transformers, and the folder of its files."""

    kind: str
    directory: Path


@dataclass(frozen=True, slots=True)
class EmbeddingFolder:
    """An embedding model, or a cross-encoder (`is_classifier`), as its files describe it.

    `pooling` are the modes whose results are joined, in sentence-transformers' order. `directory` holds the
    transformer. `max_seq_length` is None where only the model's positions bound a text.
    """

    directory: Path
    is_classifier: bool
    pooling: tuple[str, ...] = ("mean",)
    pools_prompt: bool = True
    heads: tuple[HeadModule, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    activation: str | None = None  # of a classifier's logits; None is sentence-transformers' own choice


def is_embedding_folder(directory: Path) -> bool:
    """Whether the model in `directory` gives vectors or scores rather than text."""
    if holds(directory, MODULES_FILE):
        return True
    return any(name.endswith((CLASSIFIER, "BertModel")) for name in _architectures(directory))


def read_folder(directory: Path) -> EmbeddingFolder:
    """The model in `directory`. Raises StartRefused for files that cannot be read or parts not served."""
    if any(name.endswith(CLASSIFIER) for name in _architectures(directory)):
        config = read_config(directory)
        activation = (config.get("sentence_transformers") or {}).get("activation_fn")
        activation = activation or config.get("sbert_ce_default_activation_function")
        length = _sequence_length(directory, {})
        return EmbeddingFolder(directory, True, activation=activation, max_seq_length=length)
    modules = _modules(directory)
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"]:
        raise UnsupportedModel(f"{directory / MODULES_FILE}: the first module is no Transformer.")
    transformer = modules[0][1]
    bert = _read(transformer / "sentence_bert_config.json")
    prompts = _read(directory / "config_sentence_transformers.json")
    pooling: tuple[str, ...] = ("mean",)
    pools_prompt = True
    heads: list[HeadModule] = []
    for kind, path in modules[1:]:
        if kind == "Pooling":
            pooling, pools_prompt = _pooling(path)
        elif kind in _HEADS:
            heads.append(HeadModule(kind, path))
        elif kind not in _IDLE:
            raise UnsupportedModel(f"{directory / MODULES_FILE}: the module {kind} is not served.")
    return EmbeddingFolder(
        transformer,
        is_classifier=False,
        pooling=pooling,
        pools_prompt=pools_prompt,
        heads=tuple(heads),
        prompts={str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()},
        default_prompt=prompts.get("default_prompt_name"),
        max_seq_length=_sequence_length(transformer, bert),
        lower_case=bool(bert.get("do_lower_case")),
    )


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """Class and folder of each module in order; a model without a list of them is pooled by its mean."""
    path = directory / MODULES_FILE
    if not path.is_file():
        return [("Transformer", directory)]
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        listed = sorted(listed, key=lambda each: int(each["idx"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise StartRefused(f"{path} cannot be read: {first_line(error)}.") from error
    found = []
    for each in listed:
        folder = directory / str(each.get("path", ""))
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise StartRefused(f"{path}: a module lies outside the model's folder.")
        found.append((str(each.get("type", "")).rsplit(".", 1)[-1], folder))
    return found


def _pooling(directory: Path) -> tuple[tuple[str, ...], bool]:
    config = _read(directory / "config.json")
    named = config.get("pooling_mode")
    if named is None:
        modes = tuple(mode for mode, names in _MODES.items() if any(config.get(name) for name in names))
    else:
        modes = tuple(named) if isinstance(named, list) else (str(named),)
    if not modes or set(modes) - set(_MODES):
        raise UnsupportedModel(f"{directory / 'config.json'}: the pooling {modes or named!r} is not served.")
    return modes, bool(config.get("include_prompt", True))


def _sequence_length(directory: Path, bert: Mapping[str, Any]) -> int | None:
    """The most tokens of a text by the model's files: its own setting, else the tokenizer's if it has one."""
    own = bert.get("max_seq_length")
    if own is None:
        own = _read(directory / "tokenizer_config.json").get("model_max_length")
    return int(own) if isinstance(own, int | float) and 0 < own < 10**9 else None


def _architectures(directory: Path) -> list[str]:
    """What `config.json` names; none where it is missing. Raises StartRefused."""
    if not holds(directory, "config.json"):
        return []
    return read_config(directory).get("architectures") or []


def _read(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing. Raises StartRefused for anything else."""
    return read_json(path) if path.is_file() else {}
