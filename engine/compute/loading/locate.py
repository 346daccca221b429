"""Where a model is, without converting or downloading it: what `resolve_model` would have to do first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import constants

from config import ModelSettings
from engine.compute.loading.conversion_store import convert_once
from engine.compute.loading.gguf_convert import CONVERTER_VERSION, TEXTS_VERSION
from engine.compute.loading.hub_fetch import cached_snapshot
from engine.compute.loading.hub_files import read_hub_name
from engine.compute.loading.hub_model import cached_gguf
from engine.compute.loading.missing_model import BUILT_IN
from engine.compute.loading.model_files import check_configuration, check_model_files
from engine.compute.loading.model_source import (
    find_bundled_gguf,
    installed_model,
    is_file_name,
    resolve_model,
    runs_as_it_is,
)
from engine.errors import StartRefused

_DOWNLOADS: Final = "downloads it from the Hugging Face hub"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What there is of a model. `how` says where it is from, `pending` what a start does before loading it.

    `directory` is a safetensors model's, with its weights unless something is `pending`; None when there is
    only the file `gguf`, which is not converted yet, or nothing at all yet. `as_it_is` says that the weights
    stay as a GGUF file has them.
    """

    how: str
    directory: Path | None = None
    gguf: Path | None = None
    pending: str | None = None
    as_it_is: bool = False


def find_model(settings: ModelSettings, home: Path) -> FoundModel:
    """What this machine has of the model. Raises StartRefused where `resolve_model` would do so offline."""
    name = settings.model
    distribution = BUILT_IN.get(name.lower())
    path = Path(os.path.expanduser(name))
    if distribution is not None and installed_model(name).is_dir():
        return FoundModel("built in, converted by the installation", resolve_model(settings, home))
    if distribution is not None or is_file_name(path):
        source = path if distribution is None else find_bundled_gguf(distribution)
        what = "a GGUF file" if distribution is None else f"built in, from the package {distribution}"
        if settings.revision is not None or not os.path.isfile(source):
            resolve_model(settings, home)  # refuses before it converts anything
        return _find_converted(settings, source, home, what)
    if os.path.exists(path):
        return FoundModel("a directory", resolve_model(settings, home))
    return _find_download(settings, home)


class _NotConverted(Exception):
    pass


def _find_converted(settings: ModelSettings, source: Path, home: Path, what: str) -> FoundModel:
    def refuse(_source: Path, _directory: Path) -> None:
        raise _NotConverted

    as_it_is = settings.model.lower() not in BUILT_IN and runs_as_it_is(source, settings)
    version = TEXTS_VERSION if as_it_is else CONVERTER_VERSION
    pending = "reads its tokenizer and settings, once" if as_it_is else "converts it to safetensors, once"
    try:
        directory = convert_once(source, home / "models", refuse, version)
    except _NotConverted:
        return FoundModel(what, gguf=source, pending=pending, as_it_is=as_it_is)
    if not as_it_is:
        check_model_files(directory)
    return FoundModel(f"{what}, {'run as it is' if as_it_is else 'converted'}", directory, as_it_is=as_it_is)


def _find_download(settings: ModelSettings, home: Path) -> FoundModel:
    """A Hugging Face repo: in the local cache, whole or in part, or not there yet."""
    name = read_hub_name(settings.model)
    whole = "in the Hugging Face cache"
    if name is None:
        return FoundModel(whole, resolve_model(settings, home))  # refuses it
    try:
        directory = cached_snapshot(name, settings.revision)
    except StartRefused:
        if constants.HF_HUB_OFFLINE:
            raise
        return FoundModel("not on this machine yet", pending=_DOWNLOADS)
    if (gguf := cached_gguf(name, directory)) is not None:
        return _find_converted(settings, gguf, home, f"a GGUF file {whole}")
    if constants.HF_HUB_OFFLINE:
        return FoundModel(whole, resolve_model(settings, home))  # or refuses it
    if name.pick is not None:
        return FoundModel("not on this machine yet", pending=_DOWNLOADS)
    check_configuration(directory)
    try:
        check_model_files(directory)
    except StartRefused:
        return FoundModel(f"{whole}, in part", directory, pending=_DOWNLOADS)
    return FoundModel(whole, directory)
