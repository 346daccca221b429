"""From what the user calls an embedding model to the folder that holds it: a directory, or a repo's copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from config import ModelSettings
from engine.compute.embedding.folder import MODULES_FILE, is_embedding_folder
from engine.compute.loading.hub_fetch import cached_snapshot, fetch_files, list_repo
from engine.compute.loading.hub_files import HubName, read_hub_name, text_files, weight_names
from engine.compute.loading.missing_model import not_fetched, nothing_of_that_name
from engine.compute.loading.model_files import check_configuration
from engine.errors import StartRefused

_OTHER_FORMATS = ("onnx", "openvino")


def resolve_embedding_model(settings: ModelSettings) -> Path:
    """A directory with the embedding model that `settings.model` names, its modules' folders included.

    What is missing of a repo is fetched into the hub's cache. Raises StartRefused, one line.
    """
    directory = Path(os.path.expanduser(settings.model))
    if os.path.exists(directory):
        if settings.revision is not None:
            raise StartRefused(f"--revision {settings.revision}: {settings.model} is no Hugging Face repo.")
    else:
        directory = _fetch(settings)
    check_configuration(directory)
    return directory


def find_embedding_model(settings: ModelSettings) -> Path | None:
    """The directory of a model, or of a repo's local copy; None where there is none yet."""
    directory = Path(os.path.expanduser(settings.model))
    if os.path.isdir(directory):  # unlike Path.is_dir, False where one may not look
        return directory
    name = repo_of(settings.model)
    if name is None:
        return None
    try:
        return cached_snapshot(name, settings.revision)
    except StartRefused:
        return None


def is_embedding_model(settings: ModelSettings, *, may_fetch: bool = True) -> bool:
    """Whether MODEL gives vectors or scores, by its files as far as they are here, or `may_fetch` them."""
    directory = find_embedding_model(settings)
    name = repo_of(settings.model)
    if directory is None and may_fetch and name is not None:
        try:
            listing = list_repo(name, settings.revision)
            wanted = [] if listing is None else [MODULES_FILE, "config.json"]
            if listing is not None and (files := [file for file in wanted if file in listing.files]):
                directory = fetch_files(listing, settings.revision, files)
        except StartRefused:
            return False  # loading it says better what is wrong
    return directory is not None and is_embedding_folder(directory)


def repo_of(model: str) -> HubName | None:
    """The repo that a model's name may mean: with an organisation, no path, and no GGUF file of it."""
    is_path = "/" not in model or model.lower().endswith(".gguf") or os.path.exists(model)
    name = None if is_path else read_hub_name(model)
    return None if name is None or name.pick is not None else name


def _fetch(settings: ModelSettings) -> Path:
    name = read_hub_name(settings.model)
    if name is None or name.pick is not None:
        raise StartRefused(nothing_of_that_name(settings.model))
    listing = list_repo(name, settings.revision)
    if listing is None:
        directory = cached_snapshot(name, settings.revision)
        if not any(directory.glob("*.safetensors")):
            raise StartRefused(not_fetched(str(name), settings.revision))
        return directory
    files = list(listing.files)
    texts = [*text_files(files), *_of_modules(files)]
    directory = fetch_files(listing, settings.revision, texts)
    return fetch_files(listing, settings.revision, [*texts, *weight_names(name, files, directory)])


def _of_modules(files: Sequence[str]) -> list[str]:
    """The files of modules, each in a folder of its own, such as 1_Pooling/config.json."""
    return [
        file
        for file in files
        if file.count("/") == 1
        and not file.startswith(_OTHER_FORMATS)
        and file.endswith(("/config.json", "/model.safetensors"))
    ]
