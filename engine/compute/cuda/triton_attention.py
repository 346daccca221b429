"""Attention on CUDA through Triton: paged keys are read in place, and once for all the heads that share them.

Every result is computed in one fixed order, so equal steps give equal bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from engine.compute.attention.backend import LayerCall
from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.cuda.fused_norms import warps_for
from engine.compute.cuda.rotation_kernels import rotate_kernel, rotate_rows_kernel
from engine.compute.cuda.triton_kernels import attend_kernel, merge_kernel
from engine.compute.cuda.triton_pages import pages_of, store_kernel
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.cuda.triton_tile import TritonTile, padded
from engine.compute.cuda.triton_work import HeadShape, TileKind, Workforce
from engine.plan.step_records import StepInputs

_LOG2_E = math.log2(math.e)
_MERGED_AT_ONCE = 16


class Gpu(NamedTuple):
    """What the layout of work depends on: multiprocessors, and bytes of shared memory that a program gets."""

    processors: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """The GPU that is `device`, as Triton sees it."""
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = driver.active.utils.get_device_properties(index)
        return cls(properties["multiprocessor_count"], properties["max_shared_mem"])


class TritonAttention:
    """The CUDA backend."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def plan(self, inputs: StepInputs, kv: KvTensors) -> TritonStep:
        """The step's tables on the device, sent without waiting for it."""
        tables = StepTables(kv.device, self.workforce(kv))
        tables.fill(inputs)
        return self.step(tables, kv)

    def workforce(self, kv: KvTensors) -> Workforce:
        """The processors that the work over `kv` is divided among."""
        return Workforce.of(self._gpu.processors, kv.compute_dtype.itemsize)

    def step(self, tables: StepTables, kv: KvTensors) -> TritonStep:
        """A step over tables that the caller fills, and may refill once the step was recorded."""
        return TritonStep(self._gpu, tables, kv)


class TritonStep:
    """One step of the CUDA backend, or all that fit a bucket; launches only, and never waits."""

    def __init__(self, gpu: Gpu, tables: StepTables, kv: KvTensors) -> None:
        self._gpu = gpu
        self._tables = tables
        self._kv = kv
        self._tiles: dict[tuple[str, int, LayerKv, bool, bool], TritonTile] = {}
        self._workforce = Workforce.of(gpu.processors, kv.compute_dtype.itemsize)
        self._pages = pages_of(kv.dtype)

    @property
    def slots(self) -> torch.Tensor:
        """See RotatingStep."""
        return self._tables.arrays["slots"]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""
        shape = self._kv.layers[layer]
        key, value = _dense_rows(key), _dense_rows(value)
        store_kernel[(len(key),)](
            key,
            value,
            self._kv.keys[layer],
            self._kv.values[layer],
            self.slots,
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_KV_HEADS=shape.num_kv_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            PADDED_KEY_DIM=padded(shape.key_dim),
            PADDED_VALUE_DIM=padded(shape.value_dim),
            BLOCK_SIZE=self._kv.block_size,
            VALUE_IN_KEY=shape.value_in_key,
            HEADS=1 << (shape.num_kv_heads - 1).bit_length(),
            PAGES=self._pages,
        )

    def rotate_and_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        turns: HeadTurns | None,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """See RotatingStep: [num_tokens, num_heads, dim]."""
        shape = self._kv.layers[layer]
        dim = shape.key_dim
        kv_heads = 0 if shape.shares is not None else shape.num_kv_heads
        num_heads = qkv.shape[1] // dim - 2 * kv_heads
        query = qkv.new_empty(len(qkv), num_heads, dim)
        given = (
            qkv,
            qkv if turns is None else turns.cosines,
            qkv if turns is None else turns.sines,
            qkv if norms is None else norms.query,
            qkv if norms is None else norms.key,
            query,
            self._kv.keys[layer],
            self._kv.values[layer],
            self.slots,
            0.0 if norms is None else norms.eps,
        )
        sizes = {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": kv_heads,
            "DIM": dim,
            "TURNED": 0 if turns is None else turns.num_turned,
            "ANGLES": 0 if turns is None else turns.cosines.shape[-1],
            "OF_NEIGHBOURS": turns is not None and turns.of_neighbours,
            "IN_ORDER": turns is not None and turns.in_order,
            "BLOCK_SIZE": self._kv.block_size,
            "PAGES": self._pages,
        }
        if norms is not None and len(norms.query) > dim:
            rotate_rows_kernel[(2 * len(qkv),)](
                *given,
                **sizes,
                PADDED_HEADS=triton.next_power_of_2(num_heads),
                PADDED_KV_HEADS=triton.next_power_of_2(kv_heads),
                PADDED_DIM=triton.next_power_of_2(dim),
                num_warps=warps_for(num_heads * dim),
            )
            return query
        rotate_kernel[(len(qkv) * (num_heads + 2 * kv_heads),)](
            *given,
            **sizes,
            HAS_NORMS=norms is not None,
            NORMS_VALUES=norms is not None and norms.norms_values,
            PADDED_HALF=triton.next_power_of_2(dim // 2),
            num_warps=1,  # for half a head
        )
        return query

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """See StepAttention. The rows that a bucket has beyond the step's tokens are zero."""
        query = _dense_rows(query)
        num_tokens, num_heads, _ = query.shape
        layer = self._kv.layers[call.layer]
        work = self._tables.work(HeadShape(num_heads, layer.num_kv_heads, call.reach))
        output = query.new_empty(num_tokens, num_heads, layer.value_dim)
        partials = (work.num_partials, num_heads)
        sums = query.new_empty((*partials, layer.value_dim), dtype=torch.float32)
        weights = query.new_empty((*partials, 2), dtype=torch.float32)
        for kind, items in zip(self._workforce.kinds, work.items, strict=True):
            if len(items):
                self._attend_items(kind, items, query, call, (output, sums, weights))
        if len(work.merges):
            merge_kernel[(num_heads * len(work.merges),)](
                sums,
                weights,
                output,
                call.sinks,
                work.merges,
                self.slots,
                HAS_SINKS=call.sinks is not None,
                HAS_PADDING=self._tables.has_padding,
                NUM_HEADS=num_heads,
                DIM=layer.value_dim,
                PADDED=padded(layer.value_dim),
                AT_ONCE=_MERGED_AT_ONCE,
            )
        return output

    def _attend_items(
        self,
        kind: TileKind,
        items: torch.Tensor,
        query: torch.Tensor,
        call: LayerCall,
        targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """One launch: the tiles of one kind, to `targets` (output, partial sums, partial weights)."""
        arrays, layer = self._tables.arrays, call.layer
        shape = self._kv.layers[layer]
        what = kind.name, query.shape[1], shape, call.softcap is None, call.sinks is None
        tile = self._tiles.get(what)
        if tile is None:
            tile = self._tiles[what] = self._tile(kind, query.shape[1], call)
        scale, cap = call.scaling * _LOG2_E, 0.0
        if call.softcap is not None:
            scale, cap = call.scaling / call.softcap, call.softcap * _LOG2_E
        attend_kernel[(tile.programs * len(items),)](
            query,
            self._kv.keys[layer],
            self._kv.values[layer],
            *targets,
            call.sinks,
            items,
            arrays["block_tables"],
            arrays["table_starts"],
            arrays["query_starts"],
            arrays["kv_lens"],
            arrays["positions"],
            arrays["tree_rows"],
            arrays["tree_bits"],
            scale,
            cap,
            0 if call.reach is None else call.reach.size,
            *query.stride()[:2],
            arrays["tree_bits"].shape[1],
            TILE=tile,
            num_warps=tile.num_warps,
            num_stages=max(1, tile.stages(self._kv.compute_dtype.itemsize, self._gpu.shared_memory)),
        )

    def _tile(self, kind: TileKind, num_heads: int, call: LayerCall) -> TritonTile:
        layer = self._kv.layers[call.layer]
        group = num_heads // layer.num_kv_heads
        heads = kind.heads(group)
        may_have = kind.max_queries > 1 and self._tables.longest_tree >= self._workforce.fewest_queries(kind)
        has_trees = kind.expects_trees or may_have
        tile = TritonTile(
            queries=kind.queries,
            heads=heads,
            keys=kind.keys_at_once(has_trees=has_trees, in_bytes=self._pages != "plain"),
            group=group,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            block_size=self._kv.block_size,
            has_cap=call.softcap is not None,
            has_window=call.reach is not None,
            in_chunks=call.chunk is not None,
            has_sinks=call.sinks is not None,
            has_trees=has_trees,
            most_stages=kind.stages,
            pages=self._pages,
            value_in_key=layer.value_in_key,
        )
        return tile.fitted(self._kv.compute_dtype.itemsize, self._gpu.shared_memory)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy whose last dimension is dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
