"""How the products of a mixture's experts are divided among programs: by its shape and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from engine.compute.native.records import Activation

# Rows up to which the tiles are always the same: what a row's bits are cannot depend on who is beside it.
FEW_ROWS = 64
# Pairs of a row and an expert up to which each tile's program finds its own among all, by its own numbers: so
# they need not be sorted in a launch before. Of more it would read and compare for longer. Not yet measured.
MOST_FOUND = 128
# The rows of a tile, and up to how many rows of an expert, on average, it is the one to take: less of a small
# tile is empty, a large one reads the weights fewer times. Not yet measured.
_ROWS_UP_TO = ((16, 16.0), (64, 96.0), (128, float("inf")))
_STEP_BYTES = {16: 256, 64: 128, 128: 128}  # of a row of weights at a time, by the rows of a tile


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What a kernel's code knows of a mixture, by whose words Triton finds what it compiled.

    Each of `count` experts has weights [2 * width, hidden], gates first, and [hidden, width]. With `limit`
    gates and ups have biases and are kept within it, as gpt-oss's: gate * sigmoid(alpha * gate) * (up + 1);
    0 is no limit, no bias, and activation(gate) * up. Unless `is_gated` there are [width, hidden] alone, and
    activation(up).

    Beside them may be `num_shared` that all rows go through, as wide, with gates and without limits. They are
    numbered behind the others.
    """

    count: int
    hidden: int
    width: int
    alpha: float = 1.0
    limit: float = 0.0
    activation: Activation = Activation.SILU
    is_gated: bool = True
    num_shared: int = 0

    @property
    def num_experts(self) -> int:
        """How many there are with those that all rows go through."""
        return self.count + self.num_shared

    @property
    def num_first(self) -> int:
        """How many products of `width` outputs come before the activation."""
        return 2 if self.is_gated else 1

    @property
    def is_limited(self) -> bool:
        """Whether there are limits, and biases."""
        return self.limit > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """How a router chooses `each` of `count` experts for a row, and what shares these get.

    A score is a softmax over all, or with `by_sigmoid` each number's own sigmoid. The highest are chosen. Of
    `num_groups` of equally many neighbours only the `kept_groups` with the highest sums of two count. Shares
    are scores, over their sum and `least` where `is_normed`, times `factor`. After them come `num_shared`
    that all rows go through, numbered from `count` on, with shares of one.
    """

    count: int
    each: int
    is_normed: bool = True
    by_sigmoid: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    least: float = 0.0
    factor: float = 1.0
    num_shared: int = 0

    @property
    def size(self) -> int:
        """How many experts a group has."""
        return self.count // self.num_groups


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """A tile of `rows` rows by `outs` outputs of one expert; of gates it is half of them, and their ups.

    `num_warps` groups of 32 threads work on it; `num_stages` steps of weights and inputs are on their way.
    With `most_found` there are no more pairs of a row and an expert, and none is sorted: a tile begins at
    each pair whose expert has a multiple of `rows` before it.
    """

    rows: int
    outs: int
    num_warps: int
    num_stages: int
    most_found: int = 0

    def num_tiles(self, num_pairs: int, count: int) -> int:
        """How many tiles so many pairs of a row and an expert can need at most, whoever chose which."""
        if self.most_found:
            return num_pairs
        return num_pairs // self.rows + min(count, num_pairs)


def layout_for(num_rows: int, each: int, shape: ExpertShape) -> ExpertLayout:
    """That of `num_rows` rows which go through `each` experts."""
    if num_rows <= _most_rows_found(each):
        return _FOUND
    mean = num_rows * each / shape.num_experts
    rows = next(rows for rows, most in _ROWS_UP_TO if num_rows <= FEW_ROWS or mean <= most)
    return _LAYOUTS[rows]


def step_of(width: int, itemsize: int, layout: ExpertLayout) -> int:
    """How many of `width` inputs, of so many bytes each, a tile takes at a time."""
    most = _STEP_BYTES[layout.rows] // itemsize
    return most if width % most == 0 else most // 2


def rows_of_each_layout(each: int, shape: ExpertShape) -> tuple[int, ...]:
    """The fewest rows that have each of the layouts."""
    found = _most_rows_found(each)
    ends = (max(FEW_ROWS, int(most * shape.num_experts / each)) for _, most in _ROWS_UP_TO[:-1])
    return tuple(sorted({1, found + 1, *(end + 1 for end in ends)}))


def rows_of_each_way(choice: Choice, shape: ExpertShape) -> tuple[int, ...]:
    """The fewest rows that have each layout of few, and the fewest that are many.

    For experts that all rows go through, which of many rows are no more of the others.
    """
    of_few = rows_of_each_layout(choice.each + choice.num_shared, shape)
    return (*(count for count in of_few if count <= FEW_ROWS), FEW_ROWS + 1)


def _most_rows_found(each: int) -> int:
    """Of so many experts each, the most whose pairs are found and not sorted."""
    return min(FEW_ROWS, MOST_FOUND // each)


_FOUND = ExpertLayout(16, 64, num_warps=4, num_stages=4, most_found=MOST_FOUND)
_LAYOUTS = {
    16: ExpertLayout(16, 64, num_warps=4, num_stages=4),
    64: ExpertLayout(64, 128, num_warps=4, num_stages=3),
    128: ExpertLayout(128, 128, num_warps=8, num_stages=3),
}
