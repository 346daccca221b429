"""Which files of a Hugging Face repo are read to serve it: nothing is fetched, here names are chosen.

A repo has its weights as safetensors, or as GGUF files of which one is read. What runs code is never chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from engine.compute.loading.gguf_file import is_later_part
from engine.compute.loading.model_files import read_json
from engine.errors import StartRefused

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PICK: Final = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
_TEXTS: Final = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_NO_TEXTS: Final = ("consolidated*", "*.index.*.json")
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_QUANTIZATION: Final = re.compile(r"(?:^|[-._])((?:I?Q\d\w*|T?Q\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE)
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_NAMED: Final = 30


@dataclass(frozen=True, slots=True)
class HubName:
    """A repo, and which of its GGUF files: a quantization such as Q4_K_M or a file's name; None: not said."""

    repo: str
    pick: str | None = None

    def __str__(self) -> str:
        return self.repo if self.pick is None else f"{self.repo}:{self.pick}"


def read_hub_name(name: str) -> HubName | None:
    """`ORG/REPO`, `ORG/REPO:Q4_K_M` or `ORG/REPO:file.gguf`; None for what cannot be one."""
    repo, colon, pick = name.partition(":")
    if not _REPO_ID.fullmatch(repo) or (colon and not _PICK.fullmatch(pick)):
        return None
    return HubName(repo, pick or None)


def text_files(files: Sequence[str]) -> list[str]:
    """The configuration, tokenizer and templates among a repo's `files`; folders hold other formats."""
    return [
        file
        for file in files
        if "/" not in file
        and any(fnmatchcase(file, pattern) for pattern in _TEXTS)
        and not any(fnmatchcase(file, pattern) for pattern in _NO_TEXTS)
    ]


def has_safetensors(files: Sequence[str]) -> bool:
    """True for a repo whose own weights are safetensors."""
    return any(file.endswith(".safetensors") and "/" not in file for file in files)


def weight_names(name: HubName, files: Sequence[str], directory: Path) -> list[str]:
    """The safetensors among `files` that hold the weights; `directory` has the texts. Raises StartRefused."""
    if WEIGHTS in files:
        return [WEIGHTS]
    if (directory / INDEX).is_file():
        shards = read_json(directory / INDEX).get("weight_map")
        named = {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
        return sorted(named.intersection(files))
    pickled = sorted(file for file in files if file.endswith(_PICKLED) and "/" not in file)
    beside = f" (only {pickled[0]}, which could run code when read)" if pickled else ""
    raise StartRefused(f"{name} has no safetensors weights{beside} and no GGUF file.")


def gguf_name(name: HubName, files: Sequence[str]) -> str | None:
    """The GGUF file that `name` means among a repo's `files`; None when it means the safetensors.

    Of one that is split, its first part. Raises StartRefused where it is none of them or more than one.
    """
    models = gguf_models(files)
    if name.pick is None and (has_safetensors(files) or not models):
        return None
    if not models:
        raise StartRefused(f"{name.repo} has no GGUF files; without :{name.pick} its own weights are read.")
    found = models if name.pick is None else [file for file in models if _is_meant(file, name.pick)]
    if len(found) != 1:
        raise StartRefused(_refusal(name, models, found))
    return found[0]


def gguf_models(files: Sequence[str]) -> list[str]:
    """The GGUF models among a repo's `files`: of one that is split its first part, and no projectors."""
    return sorted(
        file
        for file in files
        if file.lower().endswith(".gguf")
        and not is_later_part(file)
        and not Path(file).name.lower().startswith("mmproj")
    )


def _refusal(name: HubName, models: Sequence[str], found: Sequence[str]) -> str:
    choice = ", ".join(short_pick(file, models) for file in (found or models)[:_MOST_NAMED])
    if name.pick is None:
        return f"{name.repo} has several GGUF files: name one, as in {name.repo}:Q4_K_M. It has {choice}."
    if found:
        return f"{name} could be several files: name one of {choice}."
    return f"{name.repo} has no GGUF file {name.pick}. It has {choice}."


def _is_meant(file: str, pick: str) -> bool:
    """Whether `pick` is the file, its name, or the quantization that its name ends with."""
    low, word = file.lower(), pick.lower()
    stem = _PART.sub("", Path(low).stem)
    return word in (low, Path(low).name) or re.search(rf"(^|[-._]){re.escape(word)}$", stem) is not None


def short_pick(file: str, models: Sequence[str]) -> str:
    """What picks `file` among `models`: its quantization where no other has it, else its path."""
    match = _QUANTIZATION.search(_PART.sub("", Path(file).stem))
    alone = match and sum(_is_meant(other, match[1]) for other in models) == 1
    return match[1] if match and alone else file
