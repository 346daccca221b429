"""The model that a Hugging Face repo has: fetched into the hub's cache, or what the cache has of it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.compute.loading.gguf_file import part_names
from engine.compute.loading.hub_fetch import cached_snapshot, fetch_files, list_repo
from engine.compute.loading.hub_files import HubName, gguf_name, text_files, weight_names
from engine.compute.loading.missing_model import not_fetched
from engine.compute.loading.model_files import check_configuration, check_model_files
from engine.compute.loading.support import read_architecture
from engine.errors import StartRefused


def fetch_model(name: HubName, revision: str | None) -> Path:
    """The directory with the safetensors model of a repo, or the GGUF file that `name` picks.

    What is missing is fetched, the weights only if the texts say that they can be served. Without the hub it
    is what the cache has. Raises StartRefused, one line.
    """
    listing = list_repo(name, revision)
    if listing is None:
        return _from_cache(name, revision)
    files = list(listing.files)
    if (gguf := gguf_name(name, files)) is not None:
        parts = part_names(gguf)
        if missing := [part for part in parts if part not in listing.files]:
            raise StartRefused(f"{name} is incomplete: {gguf} is there, and {missing[0]} is not.")
        return fetch_files(listing, revision, parts) / gguf
    texts = text_files(files)
    directory = fetch_files(listing, revision, texts)
    check_configuration(directory)
    read_architecture(directory)
    directory = fetch_files(listing, revision, [*texts, *weight_names(name, files, directory)])
    check_model_files(directory)
    return directory


def cached_gguf(name: HubName, directory: Path) -> Path | None:
    """The GGUF file that `name` means in a repo's snapshot; None when not all is there or none is meant."""
    files = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if os.path.isfile(path)]
    try:
        found = gguf_name(name, files)
    except StartRefused:  # the repo may have what the cache has not
        return None
    is_whole = found is not None and all(part in files for part in part_names(found))
    return directory / found if found is not None and is_whole else None


def _from_cache(name: HubName, revision: str | None) -> Path:
    directory = cached_snapshot(name, revision)
    if (gguf := cached_gguf(name, directory)) is not None:
        return gguf
    try:
        weights = any(path.suffix in (".safetensors", ".bin") for path in directory.iterdir())
    except OSError as error:  # closed to this user
        raise StartRefused(f"{directory} cannot be read: {error.strerror}.") from error
    if name.pick is not None or not weights:
        raise StartRefused(not_fetched(str(name), revision))
    check_model_files(directory)
    return directory
