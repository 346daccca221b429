"""A GGUF file's single values and tensors, mapped from disk; every length is checked before it is believed.

No two tensors share bytes, so what they unpack to is within a small multiple of the file's size.

Format: the GGUF specification of ggml, versions 2 and 3, little-endian. Long lists (the vocabulary) are
passed over, which makes this fifty times as fast as a reader that keeps them.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quant_shape_from_byte_shape, quant_shape_to_byte_shape
from numpy.typing import NDArray

Scalar = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MOST_NUMBERS = 1024  # of a list that is read: one for each layer, say
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, still in its blocks; `blocks` is bytes, shaped [..., bytes of a row]."""

    name: str
    quantization: GGMLQuantizationType
    blocks: NDArray[np.uint8]

    @property
    def num_columns(self) -> int:
        """How many numbers a row has."""
        shape: tuple[int, ...] = quant_shape_from_byte_shape(self.blocks.shape, self.quantization)
        return shape[-1]

    def values(self) -> NDArray[np.float32]:
        """The numbers. Raises NotImplementedError for a block format that cannot be unpacked."""
        numbers: NDArray[np.float32] = dequantize(self.blocks, self.quantization)
        return numbers


@dataclass(frozen=True, slots=True)
class GgufList:
    """A list: its `numbers` where it has few, and None where it was passed over."""

    length: int
    numbers: tuple[int | float, ...] | None = None


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`values` holds the metadata by name, `tensors` are in the file's order."""

    values: dict[str, Scalar | GgufList]
    tensors: tuple[GgufTensor, ...]

    @property
    def format_bytes(self) -> dict[str, int]:
        """How many bytes of tensors there are in each format, by its name, most first."""
        count: Counter[str] = Counter()
        for tensor in self.tensors:
            count[tensor.quantization.name] += tensor.blocks.nbytes
        return dict(count.most_common())


class _TensorHead(NamedTuple):
    """An entry of the tensor table; `offset` counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Its shape with rows counted in bytes. Raises ValueError for rows that are no whole blocks."""
        shape: tuple[int, ...] = quant_shape_to_byte_shape(self.shape, self.quantization)
        return shape

    @property
    def end(self) -> int:
        """The offset behind its last byte; raises ValueError as `byte_shape` does."""
        return self.offset + prod(self.byte_shape)


def part_names(name: str) -> list[str]:
    """The names of all parts of a file that is split, in order; its own where it is whole."""
    found = _PART.search(name)
    count = int(found[2]) if found else 1
    return [_PART.sub(f"-{part + 1:05}-of-{count:05}", name) for part in range(count)]


def is_later_part(name: str) -> bool:
    """True for a part of a split file behind the first, which stands for all of them."""
    return part_names(name)[0] != name


def part_paths(path: Path) -> list[Path]:
    """The files that a model consists of whose first is `path`."""
    return [path.with_name(name) for name in part_names(path.name)]


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and read its header; of a split file all parts, with the first one's metadata.

    Raises ValueError for a file that is no GGUF, damaged, cut off or incomplete.
    """
    whole = _read_part(path)
    count = whole.values.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return whole
    paths = part_paths(path)
    if whole.values.get("split.no") != 0:
        raise ValueError(f"it is a later part of a split model: name the first, {paths[0].name}")
    if len(paths) != count:
        raise ValueError(f"it is the first of {count} parts, which its name does not say")
    tensors = list(whole.tensors)
    for number, part in enumerate(paths[1:], 1):
        tensors += _later_part(part, number, count)
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors) or len(tensors) != whole.values.get("split.tensors.count", len(tensors)):
        raise ValueError(f"its {count} parts do not belong together")
    return GgufFile(whole.values, tuple(tensors))


def _later_part(path: Path, number: int, count: int) -> Sequence[GgufTensor]:
    """The tensors of a part, counted from 0. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"its part {path.name} is missing")
    try:
        part = _read_part(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if (part.values.get("split.no"), part.values.get("split.count")) != (number, count):
        raise ValueError(f"{path.name} is not part {number + 1} of {count}")
    return part.tensors


def _read_part(path: Path) -> GgufFile:
    content = np.asarray(np.memmap(path, mode="r"))
    cursor = _Cursor(content.data)
    magic, version = cursor.take("4sI")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("it is no GGUF file of version 2 or 3")
    num_tensors, num_values = cursor.take("QQ")
    values: dict[str, Scalar | GgufList] = {}
    for _ in range(num_values):
        name = cursor.take_string()
        values[name] = _take_value(cursor)
    heads = [_take_tensor(cursor) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    _check_places(heads, alignment)
    start = -(-cursor.position // alignment) * alignment
    return GgufFile(values, tuple(_map_tensor(content[start:], head) for head in heads))


class _Cursor:
    """Reads forward through bytes; reading past the end raises ValueError."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        """The next values, laid out as `struct` names it."""
        start = self.skip(struct.calcsize("<" + layout))
        return struct.unpack_from("<" + layout, self._content, start)

    def take_string(self) -> str:
        """The next text; bytes that are no UTF-8 are replaced."""
        start = self.skip_string()
        return bytes(self._content[start : self.position]).decode("utf-8", "replace")

    def skip_string(self) -> int:
        """Pass over a text and say where it starts."""
        return self.skip(self.take("Q")[0])

    def skip(self, size: int) -> int:
        """Pass over `size` bytes and say where they start."""
        if size > len(self._content) - self.position:
            raise ValueError("it ends within its header")
        start = self.position
        self.position += size
        return start


def _take_value(cursor: _Cursor) -> Scalar | GgufList:
    """The next value, which its kind precedes."""
    (kind,) = cursor.take("I")
    if kind == _STRING:
        return cursor.take_string()
    if kind != _ARRAY:
        value: Scalar = cursor.take(_layout(kind))[0]
        return value
    kind, length = cursor.take("IQ")
    if kind != _STRING and length <= _MOST_NUMBERS:
        return GgufList(length, cursor.take(_layout(kind) * length))
    if kind != _STRING:
        cursor.skip(struct.calcsize("<" + _layout(kind)) * length)
        return GgufList(length)
    for _ in range(length):
        cursor.skip_string()
    return GgufList(length)


def _layout(kind: int) -> str:
    """How a number of this kind is laid out."""
    if kind not in _SCALARS:
        raise ValueError(f"its header holds a value of unknown kind {kind}")
    return _SCALARS[kind]


def _take_tensor(cursor: _Cursor) -> _TensorHead:
    """The next entry of the tensor table."""
    name = cursor.take_string()
    (num_dimensions,) = cursor.take("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"its tensor {name} has {num_dimensions} dimensions")
    shape = cursor.take(f"{num_dimensions}Q")[::-1]  # stored innermost first
    if 0 in shape:
        raise ValueError(f"its tensor {name} is empty")
    kind, offset = cursor.take("IQ")
    return _TensorHead(name, shape, GGMLQuantizationType(kind), offset)


def _check_places(heads: Sequence[_TensorHead], alignment: int) -> None:
    """Raise ValueError unless each tensor begins where one may and ends before the next begins."""
    in_place = sorted(heads, key=lambda head: head.offset)
    for head in in_place:
        if head.offset % alignment:
            raise ValueError(f"its tensor {head.name} lies at {head.offset}, no multiple of {alignment}")
    for before, after in pairwise(in_place):
        if before.end > after.offset:
            raise ValueError(f"its tensors {before.name} and {after.name} overlap")


def _map_tensor(data: NDArray[np.uint8], head: _TensorHead) -> GgufTensor:
    """Cut a tensor's bytes out of the data section."""
    if head.end > len(data):
        raise ValueError(f"it ends within its tensor {head.name}")
    return GgufTensor(head.name, head.quantization, data[head.offset : head.end].reshape(head.byte_shape))
