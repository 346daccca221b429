"""The kinds of value a setting can have: how each is read and how each is named to people."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, FilePath, SecretStr

from config.units import parse_size


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kind of value is shown: `metavar` in the help, `allowed` in an error line.

    `numeric` values get the field's bounds appended, `auto` ones accept the word auto (None in the record).
    `words` are the usual values where there are others, too.
    """

    metavar: str
    allowed: str
    numeric: bool = False
    auto: bool = False
    size: bool = False
    secret: bool = False
    words: tuple[str, ...] = ()


def refuse_bool(value: object) -> object:
    """Keep True from being read as the number 1. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("a boolean is no number")
    return value


def auto_is_none(value: object) -> object:
    """None for the word auto: the value is derived when the model is known."""
    return None if isinstance(value, str) and value.strip().lower() == "auto" else refuse_bool(value)


def lower_case(value: object) -> object:
    """Fixed words are read in either case."""
    return value.strip().lower() if isinstance(value, str) else value


def at_home(value: object) -> object:
    """Expand a leading ~, which no shell has done for a file or the environment. Raises ValueError."""
    if value == "":
        raise ValueError("no path")
    if not isinstance(value, str | Path):
        return value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError("there is no home directory") from error


def file_at_home(value: object) -> object:
    """The path of something that can be looked at. Raises ValueError."""
    path = at_home(value)
    if isinstance(path, Path):
        try:
            path.stat()
        except OSError as error:
            raise ValueError("it cannot be looked at") from error
    return path


def read_bytes_size(value: object) -> object:
    """A size in bytes. Raises ValueError."""
    return parse_size(refuse_bool(value))


def refuse_unsendable(secret: SecretStr) -> SecretStr:
    """A key must be able to travel in a header: printable ASCII without spaces. Raises ValueError."""
    text = secret.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("cannot be sent in a header")
    return secret


def read_device(text: str) -> str:
    """auto, cpu, cuda or cuda:N with N as people count devices, from 0. Raises ValueError."""
    word = text.strip().lower()
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?", word):
        raise ValueError("no device")
    return word


def read_host_name(text: str) -> str:
    """A host's name or address as it is compared: in lower case, without brackets or a last dot.

    Raises ValueError for a URL and for a port.
    """
    name = text.strip().lower()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if name.count(":") == 1 or not re.fullmatch(r"[^][/@\s]+", name):
        raise ValueError("no host name")
    return name.removesuffix(".")


def read_origin(text: str) -> str:
    """An origin as browsers spell it: in lower case, without a path. Raises ValueError for anything else."""
    origin = text.strip().lower().removesuffix("/")
    if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
        raise ValueError("no origin")
    return origin


def read_weight(text: str) -> str:
    """NAME=W with a name as in a key file and W a number from 0.001 to 1000. Raises ValueError."""
    name, _, weight = (part.strip() for part in text.rpartition("="))
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or not 0.001 <= float(weight) <= 1000:
        raise ValueError("no weight of a tenant")
    return f"{name}={weight}"


def read_header_name(text: str) -> str:
    """The name of a header that carries no key, in lower case. Raises ValueError."""
    name = text.strip().lower()
    if not re.fullmatch(r"[a-z0-9_-]{1,64}", name) or name in ("authorization", "x-api-key", "cookie"):
        raise ValueError("no header for a name")
    return name


Whole = Annotated[int, BeforeValidator(refuse_bool), Shape("N", "a whole number", numeric=True)]
WholeOrAuto = Annotated[
    int | None, BeforeValidator(auto_is_none), Shape("N", "a whole number", numeric=True, auto=True)
]
Number = Annotated[
    float, BeforeValidator(refuse_bool), Field(allow_inf_nan=False), Shape("X", "a number", numeric=True)
]
Seconds = Annotated[
    float,
    BeforeValidator(refuse_bool),
    Field(allow_inf_nan=False),
    Shape("SECONDS", "a number of seconds", numeric=True),
]
Size = Annotated[
    int,
    BeforeValidator(read_bytes_size),
    Shape("SIZE", "a size such as 512MiB, 1GiB or a number of bytes", size=True),
]
Text = Annotated[str, Field(min_length=1), Shape("NAME", "a name that is not empty")]
TextOrNone = Annotated[str | None, Field(min_length=1), Shape("NAME", "a name that is not empty")]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Shape("NAME", "names that are not empty")]
Device = Annotated[
    str,
    AfterValidator(read_device),
    Shape("WORD", "auto, cpu, cuda or cuda:N, N a GPU's number", words=("auto", "cpu", "cuda", "cuda:0")),
]
FileOrNone = Annotated[
    FilePath | None, BeforeValidator(file_at_home), Shape("FILE", "the path of a file that exists")
]
Directory = Annotated[Path, BeforeValidator(at_home), Shape("DIR", "the path of a directory")]
DirectoryOrNone = Annotated[Path | None, BeforeValidator(at_home), Shape("DIR", "the path of a directory")]
HeaderNameOrNone = Annotated[
    Annotated[str, AfterValidator(read_header_name)] | None,
    Shape("NAME", "the name of a header that carries no key"),
]
Weights = Annotated[
    tuple[Annotated[str, AfterValidator(read_weight)], ...],
    Shape("NAME=W", "NAME=W with a number W from 0.001 to 1000"),
]
HostNames = Annotated[
    tuple[Annotated[str, AfterValidator(read_host_name)], ...],
    Shape("NAME", "names or addresses of hosts without a port, or *"),
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(read_origin)], ...],
    Shape("ORIGIN", "origins such as https://app.example, or *"),
]
Secrets = Annotated[
    tuple[Annotated[SecretStr, AfterValidator(refuse_unsendable)], ...],
    Shape("KEY", "keys of printable ASCII without spaces, not empty", secret=True),
]
