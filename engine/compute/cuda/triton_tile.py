"""What one compiled attention kernel is made for: the shapes that its code contains as constants."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_DERIVED = ("rows", "padded_key_dim", "padded_value_dim", "padded_rest_dim", "head_tiles", "programs")
_FEWEST_ROWS = 16  # of a matrix product
# The most sums of values that one program keeps: more outgrow its registers, and where finished rows are laid
# out anew to be stored, its shared memory. Fewer beside the bits of trees or bytes that become numbers, and
# fewest beside the parts of float32.
_MOST_SUMS, _FEWER_SUMS, _FEWEST_SUMS = 1 << 15, 1 << 14, 1 << 12
_FEW_KEYS = 32


@dataclass(frozen=True, slots=True, repr=False)
class TritonTile:
    """`queries` tokens of a sequence by `heads` that share a K/V head, against `keys` positions at a time.

    `group` heads share a K/V head in the whole model, in `head_tiles` tiles. What is `padded` is the next
    power of two that a matrix product takes. `in_chunks` has the window be a chunk that tokens see alone.
    Up to `most_stages` steps of keys are on their way at once, the one that is worked on included. `pages`
    says what they are read from, as PAGES of triton_pages. An item has the queries of `query_tiles` tiles.
    With `value_in_key` a key is read in two parts, its value and the rest, and the value is not read again.
    """

    queries: int
    heads: int
    keys: int
    group: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    has_cap: bool = False
    has_window: bool = False
    has_trees: bool = False
    in_chunks: bool = False
    has_sinks: bool = False
    most_stages: int = 3
    pages: str = "plain"
    query_tiles: int = 1
    value_in_key: bool = False

    def __repr__(self) -> str:
        """All that a kernel takes from it: by these words Triton finds what it compiled, even long ago."""
        names = (*(field.name for field in fields(self)), *_DERIVED)
        return f"TritonTile({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def rows(self) -> int:
        """Rows of the tile, (query, head) pairs with the heads fastest, padded."""
        return padded(self.queries * self.heads)

    @property
    def padded_key_dim(self) -> int:
        """Columns of its queries and keys."""
        return padded(self.key_dim)

    @property
    def padded_value_dim(self) -> int:
        """Columns of its values and results."""
        return padded(self.value_dim)

    @property
    def padded_rest_dim(self) -> int:
        """Columns of its keys behind their values, where these are in them."""
        return padded(self.key_dim - self.value_dim) if self.value_in_key else 0

    @property
    def head_tiles(self) -> int:
        """How many tiles the heads of one K/V head take."""
        return -(-self.group // self.heads)

    @property
    def programs(self) -> int:
        """How many programs an item takes."""
        return self.num_kv_heads * self.head_tiles * self.query_tiles

    @property
    def num_warps(self) -> int:
        """Groups of 32 threads that work on it."""
        return 8 if self.rows >= 128 or self._num_sums >= _FEWER_SUMS or self.value_in_key else 4

    @property
    def _num_sums(self) -> int:
        return self.rows * self.padded_value_dim

    def _most_sums(self, itemsize: int) -> int:
        if itemsize > 2:
            return _FEWEST_SUMS
        return _FEWER_SUMS if self.has_trees or self.pages != "plain" else _MOST_SUMS

    def stages(self, itemsize: int, shared_memory: int) -> int:
        """How many steps of keys and values fit beside the queries; 0 for none."""
        itemsize *= 1 if itemsize <= 2 else 2  # a float32 is multiplied in two parts
        keys, values = self.padded_key_dim, self.padded_value_dim
        if self.value_in_key:
            keys, values = self.padded_value_dim + self.padded_rest_dim, 0
        queries = self.rows * keys * itemsize
        step = self.keys * (keys + values) * itemsize
        return max(0, min(self.most_stages, (shared_memory - queries) // step))

    def fitted(self, itemsize: int, shared_memory: int) -> TritonTile:
        """This tile with as many keys, a power of two, as leave room for two steps of them.

        An item's queries are divided among several where their sums are too many for one program, or they
        leave no room for two steps of the fewest keys.
        """
        tile, most = self, self._most_sums(itemsize)
        while tile._num_sums > most and tile._is_divisible:
            tile = tile._halved()
        if self.value_in_key and tile._num_sums >= _MOST_SUMS:  # beside these its scores fill registers
            tile = replace(tile, keys=min(tile.keys, _FEW_KEYS))
        while tile.stages(itemsize, shared_memory) < 2:
            if tile.keys > _FEWEST_ROWS:
                tile = replace(tile, keys=tile.keys // 2)
            elif tile._is_divisible:
                tile = tile._halved()
            else:
                break
        return tile

    @property
    def _is_divisible(self) -> bool:
        return self.queries > 1 and self.rows > _FEWEST_ROWS

    def _halved(self) -> TritonTile:
        return replace(self, queries=self.queries // 2, query_tiles=2 * self.query_tiles)


def padded(size: int) -> int:
    """The least power of two of 16 or more that is not below `size`."""
    return max(_FEWEST_ROWS, 1 << (size - 1).bit_length())
