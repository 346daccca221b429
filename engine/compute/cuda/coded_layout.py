"""How the products of a coded weight are divided among programs: by its shape and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from engine.compute.loading.coded_weights import CodedWeight, CodeKind

# Rows up to which a step is a matter of reading weights: these are multiplied as codes, in tiles.
MOST_TILED = 256
_OUTS, _MOST_ROWS = 64, 64
_PROGRAMS = 512  # that keep any GPU busy. A constant, since the order of sums depends on it
_LEAST_CHUNKS = 4  # of columns in a part
_SPLIT_ROWS = 32  # beyond, the sums of parts would be as much to move as the weights


@dataclass(frozen=True, slots=True)
class CodedShape:
    """What a kernel's code knows of a coded weight, by whose words Triton finds what it compiled.

    `row` codes, or bytes of two where they are paired, are an output's; `groups` of `group` columns have a
    scale, as have `rows` outputs. `x_group` columns of rounded inputs share one; 0 rounds none.
    """

    width: int
    row: int
    group: int
    groups: int
    rows: int
    middle: int
    is_paired: bool
    has_zeros: bool
    has_order: bool
    x_group: int

    @classmethod
    def of(cls, coded: CodedWeight) -> CodedShape:
        """That of a weight."""
        rounding = coded.rounding
        return cls(
            width=coded.in_features,
            row=coded.codes.shape[1],
            group=coded.group,
            groups=coded.scales.shape[1],
            rows=coded.rows,
            middle=coded.kind.middle,
            is_paired=coded.kind is CodeKind.INT4,
            has_zeros=coded.zeros is not None,
            has_order=coded.order is not None,
            x_group=0 if rounding is None else rounding.width(coded.in_features),
        )


@dataclass(frozen=True, slots=True)
class ProductLayout:
    """A tile of `outs` outputs by `rows` rows, which takes `step` places of codes at a time, a chunk.

    The sums of `num_parts` parts, of `chunks_of_part` chunks each, are added up in their order: by one
    program, or with `is_split` by another kernel, to the same bits. With `is_native` matrix units multiply
    numbers of 8 bits as they are, which is twice as fast and less exact; else as float16, which is exact.
    """

    outs: int
    rows: int
    step: int
    num_chunks: int
    num_parts: int
    chunks_of_part: int
    is_split: bool = False
    is_native: bool = False

    @property
    def num_warps(self) -> int:
        """Groups of 32 threads that work on a tile."""
        return 8 if self.outs * self.rows >= 128 * 128 else 4

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int]:
        """How many programs there are."""
        tiles = -(-num_outputs // self.outs) * -(-num_rows // self.rows)
        return (tiles * (self.num_parts if self.is_split else 1),)


def tiled_layout(coded: CodedWeight, num_rows: int) -> ProductLayout:
    """That of a few rows. How many there are changes the size of a tile, and no row's bits."""
    row, step = coded.codes.shape[1], coded.step
    num_chunks = -(-row // step)
    tiles = -(-coded.out // _OUTS)
    num_parts = max(1, min(_PROGRAMS // tiles, num_chunks // _LEAST_CHUNKS))
    chunks_of_part = -(-num_chunks // num_parts)
    num_parts = -(-num_chunks // chunks_of_part)
    rows = min(_MOST_ROWS, max(16, 1 << (num_rows - 1).bit_length()))
    is_split = num_parts > 1 and num_rows <= _SPLIT_ROWS
    return ProductLayout(_OUTS, rows, step, num_chunks, num_parts, chunks_of_part, is_split)


def large_layout(coded: CodedWeight, itemsize: int) -> ProductLayout:
    """That of many rows of rounded inputs, whose arithmetic is what takes the time.

    Sums that matrix units make of 8 bits keep some 13 of theirs: enough for results of 16, not for float32.
    """
    step = 128 if _share_scales(coded, 128) else coded.step
    num_chunks = -(-coded.codes.shape[1] // step)
    return ProductLayout(128, 128, step, num_chunks, 1, num_chunks, is_native=step >= 32 and itemsize <= 2)


def _share_scales(coded: CodedWeight, columns: int) -> bool:
    """Whether so many neighbours never have two scales, of weights or of inputs."""
    width = coded.in_features
    groups = (coded.group, width if coded.rounding is None else coded.rounding.width(width))
    return all(group >= width or group % columns == 0 for group in groups)
