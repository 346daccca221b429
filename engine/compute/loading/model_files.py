"""What may be read from a model directory: `config.json` and whole safetensors files, nothing that can run.

Every directory passes here before any other code opens a file in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from engine.compute.loading.gguf_file import read_gguf
from engine.errors import StartRefused, UnsupportedModel

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Models that transformers knows by another name only; the code beside their weights adds to that what is not
# needed to serve them. MiMo is Qwen2 with MTP modules.
UNDER_ANOTHER_NAME = {"mimo": "qwen2"}
GGUF_FILE = "gguf.json"  # names the GGUF file that the weights are in
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_model_files(directory: Path) -> None:
    """Raise StartRefused, with one line, unless `directory` holds a complete model that runs no code.

    Refused are a missing configuration, an adapter, weights that are not safetensors, a missing shard, a
    damaged header, and a model or tokenizer that only exists as code beside the weights.
    """
    check_configuration(directory)
    if (source := gguf_of(directory)) is not None:
        if not source.is_file():
            raise StartRefused(f"There is no file {source}.")
        return
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt"):  # compares the header with the file's size
                pass
        except (OSError, SafetensorError) as error:
            raise bad_weights(path, error) from error


def check_configuration(directory: Path) -> None:
    """The part of `check_model_files` that needs no weights."""
    if not holds(directory, "config.json"):
        raise StartRefused(f"{directory} is no model directory: it has no config.json.")
    if (directory / "adapter_config.json").exists():
        raise StartRefused(
            f"{directory} holds an adapter (adapter_config.json): merge it into its model first."
        )
    config = read_config(directory)
    # A known architecture may name code too; it is then simply never looked at.
    known = config.get("model_type") in CONFIG_MAPPING or config.get("model_type") in UNDER_ANOTHER_NAME
    if config.get("auto_map") and not known:
        raise UnsupportedModel(
            f"The architecture {config.get('model_type')!r} needs Python code that ships with the model "
            "(auto_map), which is never run."
        )
    tokenizer = directory / "tokenizer_config.json"
    needs_class = tokenizer.is_file() and not (directory / "tokenizer.json").is_file()
    if needs_class and read_json(tokenizer).get("auto_map"):
        raise StartRefused(f"{directory}: the tokenizer needs Python code (auto_map), which is never run.")


def holds(directory: Path, name: str) -> bool:
    """Whether there is such a file. Raises StartRefused where the system says nothing of what is in there."""
    try:
        return (directory / name).is_file()
    except OSError as error:  # closed to this user, above all
        raise StartRefused(f"{directory} cannot be read: {error.strerror}.") from error


def gguf_of(directory: Path) -> Path | None:
    """The GGUF file that has the weights of the model in `directory`; None for one of safetensors."""
    if not (directory / GGUF_FILE).is_file():
        return None
    return Path(str(read_json(directory / GGUF_FILE).get("file")))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights, at least one. Raises StartRefused."""
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    if not (directory / _INDEX).is_file():
        pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
        beside = f" (only {pickled[0]}, which could run code when read)" if pickled else ""
        raise StartRefused(f"{directory} has no safetensors weights{beside}.")
    shards = read_json(directory / _INDEX).get("weight_map")
    names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
    foreign = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if foreign:
        raise StartRefused(
            f"{directory} cannot be loaded: {_INDEX} names {foreign[0]!r}, no .safetensors file in it."
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise StartRefused(
            f"{directory} is incomplete: {_INDEX} names {missing or 'no files'}, none is there."
        )
    return [directory / name for name in names]


def count_tensors(directory: Path) -> int:
    """How many tensors the weights hold."""
    return len(tensor_names(directory))


def tensor_names(directory: Path) -> list[str]:
    """The names of the tensors that the weights hold."""
    names: list[str] = []
    if (source := gguf_of(directory)) is not None:
        return [tensor.name for tensor in read_gguf(source).tensors]
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return names


def stored_numbers(paths: Iterable[Path], whole: Collection[str] = ()) -> dict[str, int]:
    """How many numbers each tensor of these files holds; whole ones count only where `whole` names them.

    Raises StartRefused for a file that is missing or damaged.
    """
    found: dict[str, int] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_slice(name)
                    if name in whole or tensor.get_dtype().startswith(("F", "BF")):
                        found[name] = prod(tensor.get_shape())
        except (OSError, SafetensorError) as error:
            raise bad_weights(path, error) from error
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises StartRefused if it cannot be read or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartRefused(f"{path} cannot be read: {first_line(error)}.") from error
    if not isinstance(found, dict):
        raise StartRefused(f"{path} does not hold a JSON object.")
    return found


def read_config(directory: Path) -> dict[str, Any]:
    """The object in `config.json`, whose model_type and architectures are texts where it has any.

    Raises StartRefused as `read_json` does, and for any others.
    """
    path = directory / "config.json"
    config = read_json(path)
    if not isinstance(name := config.get("model_type"), str | None):
        raise StartRefused(f"{path}: model_type is {name!r}, no text.")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
        raise StartRefused(f"{path}: architectures is {names!r}, no list of texts.")
    return config


def read_json_value(path: Path, name: str) -> Any:
    """As `read_json`, one value of the object; None where it is missing.

    Where the first that is called `name` is a list, as a tokenizer's added tokens, it is that: the megabytes
    behind it are not looked at.
    """
    with suppress(OSError, ValueError, RecursionError):
        text = path.read_text(encoding="utf-8")
        if found := re.search(rf'"{re.escape(name)}"\s*:\s*(?=\[)', text):
            return json.JSONDecoder().raw_decode(text, found.end())[0]
    return read_json(path).get(name)


def bad_weights(path: Path, error: Exception, how: str = "damaged or incomplete") -> StartRefused:
    """The refusal of a safetensors file that could not be read; `error` is what the library says of it.

    That writes files which their owner alone may read, and calls those of others missing.
    """
    try:
        with path.open("rb"):
            pass
    except PermissionError as reason:
        return StartRefused(f"{path} cannot be read: {reason.strerror}.")
    except OSError:
        pass  # which the library has said, too
    return StartRefused(f"{path} is {how}: {first_line(error)}.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none, without a final stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
