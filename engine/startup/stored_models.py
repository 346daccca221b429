"""The models on this machine: in the Hugging Face cache, brought by an installation, converted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from safetensors import safe_open

from config import ModelSettings
from engine.compute.embedding.folder import is_embedding_folder, read_folder
from engine.compute.loading.gguf_file import GgufFile, part_paths, read_gguf
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.hub_files import HubName, gguf_models, has_safetensors, short_pick
from engine.compute.loading.missing_model import BUILT_IN
from engine.compute.loading.model_files import GGUF_FILE, check_model_files, first_line, weight_files
from engine.compute.loading.model_source import find_bundled_gguf, installed_model
from engine.compute.loading.support import Architecture, check_supported, find_model_class, read_architecture
from engine.errors import StartRefused
from engine.startup.diagnosis import StoredModel

_CACHE: Final = "Hugging Face cache"


def list_models(home: Path) -> tuple[list[StoredModel], list[str]]:
    """What there is, last used first, and what of the cache cannot be read. It is no use of what it reads."""
    found, warnings = [*_built_in(), *_converted(home)], []
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        pass
    except (OSError, ValueError) as error:  # a file, or closed to this user
        warnings = [f"The Hugging Face cache cannot be read: {first_line(error)}."]
    else:
        warnings = [first_line(warning) for warning in cache.warnings]
        for repo in cache.repos:
            if repo.repo_type == "model":
                for revision in repo.revisions:
                    found += _cached(repo, revision)
    return sorted(found, key=lambda each: (-each.last_used, each.name)), warnings


def _built_in() -> Iterator[StoredModel]:
    for name, distribution in BUILT_IN.items():
        if (directory := installed_model(name)).is_dir():
            yield _directory(name, None, "installation", directory)
            continue
        with contextlib.suppress(StartRefused):  # it is not installed
            yield _gguf(name, None, f"package {distribution}", find_bundled_gguf(distribution))


def _converted(home: Path) -> Iterator[StoredModel]:
    models = home / "models"
    if os.path.isdir(models) and os.access(models, os.R_OK | os.X_OK):
        for path in sorted(models.iterdir()):
            # Unfinished ones have a dot; some have only the texts of a GGUF file that is run as it is.
            if path.is_dir() and not path.name.startswith(".") and not os.path.isfile(path / GGUF_FILE):
                yield _directory(str(path), None, "converted copy", path)


def _cached(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[StoredModel]:
    """The models of one snapshot: its safetensors, and each GGUF file."""
    directory = revision.snapshot_path
    asked = None if "main" in revision.refs else min(revision.refs, default=revision.commit_hash)
    files = sorted(file.file_path.relative_to(directory).as_posix() for file in revision.files)
    ggufs = gguf_models(files)
    if has_safetensors(files) or not ggufs:
        yield _directory(repo.repo_id, asked, _CACHE, directory)
    for file in ggufs:
        yield _gguf(str(HubName(repo.repo_id, short_pick(file, ggufs))), asked, _CACHE, directory / file)


def _directory(name: str, revision: str | None, kept_in: str, directory: Path) -> StoredModel:
    paths = [path for path in directory.rglob("*") if os.path.isfile(path) and path.suffix.lower() != ".gguf"]
    weights = [path for path in paths if path.suffix in (".safetensors", ".bin")]
    last_used = _last_used(weights or paths)
    reason, stored = None, "safetensors" if any(path.suffix == ".safetensors" for path in weights) else "-"
    with _unused(paths):
        try:
            if is_embedding_folder(directory):
                stored = _check_embedder(directory)
            else:
                check_model_files(directory)
                stored = f"safetensors {_numbers_in(directory)}"
                read_architecture(directory)
        except StartRefused as refusal:
            reason = str(refusal)
    size = sum(path.stat().st_size for path in paths)
    return StoredModel(name, revision, kept_in, str(directory), size, stored, last_used, reason)


def _check_embedder(directory: Path) -> str:
    """How a model that embeds or scores texts is stored. Raises StartRefused for one that is not served."""
    from engine.compute.embedding.embedder import describe_embedder  # a list without one goes without it

    folder = read_folder(directory)
    describe_embedder(folder, ModelSettings())
    return f"safetensors {_numbers_in(folder.directory)}"


def _gguf(name: str, revision: str | None, kept_in: str, path: Path) -> StoredModel:
    parts = [part for part in part_paths(path) if part.exists()]
    last_used, reason, stored = _last_used(parts), None, "GGUF"
    with _unused(parts):
        try:
            file = read_gguf(path)
            stored = f"GGUF {_quantization_of(file)}"
            config, _ = read_gguf_config(file)
            check_supported(Architecture(config, find_model_class(config)))
        except StartRefused as refusal:
            reason = str(refusal)
        except Exception as error:  # a damaged file fails in any of a dozen ways
            reason = f"{path} cannot be read: {first_line(error)}."
    size = sum(part.stat().st_size for part in parts)
    return StoredModel(name, revision, kept_in, str(path), size, stored, last_used, reason)


def _numbers_in(directory: Path) -> str:
    """The type that most weights' bytes have, as safetensors names it."""
    sizes: dict[str, int] = {}
    with safe_open(weight_files(directory)[0], framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            count = 1
            for length in part.get_shape():
                count *= length
            sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + count
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else "-"


def _quantization_of(file: GgufFile) -> str:
    """The block format of most bytes; files are called after it, and _M or _S says what the rest have."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors:
        kind = tensor.quantization.name
        sizes[kind] = sizes.get(kind, 0) + tensor.blocks.nbytes
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else "-"


def _last_used(paths: Sequence[Path]) -> float:
    times = [path.stat() for path in paths]
    return max((max(each.st_atime, each.st_mtime) for each in times), default=0.0)


@contextlib.contextmanager
def _unused(paths: Sequence[Path]) -> Iterator[None]:
    """Give files their time of access back behind the block: to look at a model is not to use it."""
    before = [(path, path.stat()) for path in paths]
    try:
        yield
    finally:
        for path, stat in before:
            with contextlib.suppress(OSError):  # another's file
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
