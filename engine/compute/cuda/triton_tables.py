"""StepTables: what the Triton kernels read about a step, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from engine.compute.attention.tree_mask import TreeMask, tree_masks
from engine.compute.cuda.device_ints import DeviceInts
from engine.compute.cuda.triton_work import (
    HeadShape,
    StepLengths,
    Work,
    Workforce,
    cut_work,
    max_items,
    max_partials,
)
from engine.plan.step_records import Int32, StepInputs

_NO_BITS = np.zeros((0, 1), np.int32)
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Bucket(NamedTuple):
    """The most a step may have to be laid out in the same place as others: for work that is recorded once.

    Of one sequence, `max_query_len` counts the new tokens and `max_places` those of a draft tree;
    `max_tree_tokens` counts the tokens of all trees.
    """

    max_sequences: int
    max_tokens: int
    max_blocks: int  # of one sequence
    max_query_len: int = 1
    max_tree_tokens: int = 0
    max_places: int = 1


class DeviceWork(NamedTuple):
    """One shape's Work on the device; items and merges behind the last have -1 in their first column."""

    items: tuple[torch.Tensor, ...]  # of each kind [W, 5]
    merges: torch.Tensor  # [T, 4]
    num_partials: int


class StepTables:
    """A step on the device: its blocks, lengths and trees, and the work of every shape of heads.

    `arrays` holds `query_starts` [S + 1], `kv_lens` [S], `slots` and `positions` [N], `tree_rows` [S] and
    `tree_bits` [tokens of trees, words]: a sequence's row of `tree_bits` is -1 where its drafts are a chain;
    bit p of a token's words says that it follows the token at place p. The blocks of sequence s begin at
    `table_starts` [S] of `block_tables`, which is flat. -1 marks what is not used.

    Without a bucket it is made for one step, and a shape's work is laid out when a layer first asks. With one
    it can be refilled at the same addresses, and holds exactly the shapes given.
    """

    def __init__(self, device: torch.device, workforce: Workforce, bucket: Bucket | None = None) -> None:
        self._device = device
        self._workforce = workforce
        self._bucket = bucket
        self._works: dict[HeadShape, DeviceWork] = {}
        self._lengths: StepLengths | None = None
        # Of the sequences that have a tree the most new tokens, in a bucket the most there may be.
        self.longest_tree = 0 if bucket is None or not bucket.max_tree_tokens else bucket.max_query_len

    @property
    def has_padding(self) -> bool:
        """Whether there may be places that no token fills; then there is a merge for each place."""
        return self._bucket is not None

    @property
    def shapes(self) -> tuple[HeadShape, ...]:
        """The shapes of heads whose work is laid out."""
        return tuple(self._works)

    def room(self, shapes: Sequence[HeadShape], others: Shapes = MappingProxyType({})) -> int:
        """How many integers `reserve` needs."""
        return DeviceInts.size_of(self._layout(shapes, others))

    def reserve(
        self,
        shapes: Sequence[HeadShape],
        others: Shapes = MappingProxyType({}),
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Make room in the bucket, before it is filled: for the work of `shapes`, and for arrays of others.

        A `buffer`, of as much `room` or more, may be shared with tables that are not in use at the same time.
        """
        layout = self._layout(shapes, others)
        assert self._bucket is not None
        self.arrays = DeviceInts(layout, self._device, "block_tables", buffer)
        for number, shape in enumerate(shapes):
            kinds = self._workforce.kinds
            items = tuple(self.arrays[f"{number}.{kind.name}"] for kind in kinds)
            num_items = [len(rows) for rows in items]
            num_partials = max_partials(self._workforce, num_items, self._bucket.max_tokens, shape)
            self._works[shape] = DeviceWork(items, self.arrays[f"{number}.merges"], num_partials)

    def fill(
        self, inputs: StepInputs, others: Mapping[str, Int32] = MappingProxyType({}), num_to_come: int = 0
    ) -> None:
        """Lay out `inputs`, for every shape of a bucket, and `others`, all in one copy.

        With `num_to_come` the same work serves as many steps more, of one token each: their lengths, slots
        and positions need only be put in the place of these. Raises ValueError where something is too large.
        """
        trees = tree_masks(inputs)
        arrays = {**others, **_arrays(inputs, trees)}
        has_tree = arrays["tree_rows"] >= 0
        self._lengths = StepLengths(
            inputs.query_lens.astype(np.intp), inputs.kv_lens.astype(np.intp), has_tree
        )
        if self._bucket is None:
            self.longest_tree = int(inputs.query_lens[has_tree].max(initial=0))
            self.arrays = DeviceInts({name: array.shape for name, array in arrays.items()}, self._device)
        for number, (shape, room) in enumerate(self._works.items()):
            work = cut_work(self._lengths, shape, self._workforce)
            if work.num_partials > room.num_partials:
                raise ValueError(f"{work.num_partials} partial rows, there is room for {room.num_partials}")
            if num_to_come:
                work = work.with_keys_to_come(self._lengths, num_to_come)
            arrays |= self._arrays_of(work, number)
        self.arrays.put(arrays)

    def clear(self) -> None:
        """Mark all of a bucket as not used: a step of no sequences."""
        self.arrays.put({})

    def work(self, shape: HeadShape) -> DeviceWork:
        """What the layers of `shape` have to do; laid out now if no bucket reserved it."""
        found = self._works.get(shape)
        if found is None:
            assert self._lengths is not None and self._bucket is None
            work = cut_work(self._lengths, shape, self._workforce)
            arrays = self._arrays_of(work, 0)
            ints = DeviceInts({name: array.shape for name, array in arrays.items()}, self._device)
            ints.put(arrays)
            items = tuple(ints[f"0.{kind.name}"] for kind in self._workforce.kinds)
            found = self._works[shape] = DeviceWork(items, ints["0.merges"], work.num_partials)
        return found

    def _layout(self, shapes: Sequence[HeadShape], others: Shapes) -> dict[str, tuple[int, ...]]:
        """Every array of the bucket, the flat tables last."""
        bucket, (processors, kinds) = self._bucket, self._workforce
        assert bucket is not None
        layout = dict(others)
        for number, shape in enumerate(shapes):
            fewest = 0
            for kind in kinds:
                most = min(bucket.max_sequences, bucket.max_tokens // (fewest + 1))
                items = max_items(kind, most, bucket.max_tokens, shape, processors)
                layout[f"{number}.{kind.name}"] = (items if fewest < bucket.max_query_len else 0, 5)
                fewest = kind.max_queries
            layout[f"{number}.merges"] = (bucket.max_tokens, 4)
        return layout | _bucket_shapes(bucket)

    def _arrays_of(self, work: Work, number: int) -> dict[str, Int32]:
        named = zip(self._workforce.kinds, work.items, strict=True)
        items = {f"{number}.{kind.name}": items for kind, items in named}
        return {**items, f"{number}.merges": work.merges}


def _bucket_shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    return {
        "query_starts": (bucket.max_sequences + 1,),
        "kv_lens": (bucket.max_sequences,),
        "table_starts": (bucket.max_sequences,),
        "slots": (bucket.max_tokens,),
        "positions": (bucket.max_tokens,),
        "tree_rows": (bucket.max_sequences,),
        "tree_bits": (bucket.max_tree_tokens, -(-bucket.max_places // 32)),
        "block_tables": (bucket.max_sequences * bucket.max_blocks,),
    }


def _arrays(inputs: StepInputs, trees: Mapping[int, TreeMask]) -> dict[str, Int32]:
    num_sequences, width = inputs.block_tables.shape
    starts = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(inputs.query_lens, out=starts[1:])
    tree_rows, tree_bits = _tree_arrays(inputs, trees)
    return {
        "query_starts": starts,
        "kv_lens": inputs.kv_lens,
        "table_starts": np.arange(0, num_sequences * width, width, dtype=np.int32),
        "slots": inputs.slot_mapping.astype(np.int32),
        "positions": inputs.positions.astype(np.int32),
        "tree_rows": tree_rows,
        "tree_bits": tree_bits,
        "block_tables": inputs.block_tables.ravel(),
    }


def _tree_arrays(inputs: StepInputs, trees: Mapping[int, TreeMask]) -> tuple[Int32, Int32]:
    """`tree_rows` and `tree_bits`."""
    tree_rows = np.full(len(inputs.query_lens), -1, dtype=np.int32)
    if not trees:
        return tree_rows, _NO_BITS
    first_rows: dict[int, int] = {}  # by tree: sequences with drafts of one shape share it
    bits = []
    num_rows = 0
    for sequence, tree in trees.items():
        if id(tree) not in first_rows:
            first_rows[id(tree)] = num_rows
            bits.append(_tree_bits(tree, int(inputs.query_lens[sequence])))
            num_rows += len(bits[-1])
        tree_rows[sequence] = first_rows[id(tree)]
    words = max(rows.shape[1] for rows in bits)
    return tree_rows, np.concatenate([np.pad(rows, ((0, 0), (0, words - rows.shape[1]))) for rows in bits])


def _tree_bits(tree: TreeMask, num_places: int) -> Int32:
    """Bit p % 32 of word p // 32 says whether a token sees place p: [places, words]."""
    places = np.arange(num_places)
    seen = np.zeros((num_places, -(-num_places // 32) * 32), dtype=np.bool_)
    seen[:, :num_places] = tree.sees(places, places, None, 0)
    packed = np.packbits(seen, axis=1, bitorder="little")
    return packed.view("<i4").astype(np.int32)
