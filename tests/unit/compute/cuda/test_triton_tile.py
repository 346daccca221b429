"""The tiles that attention's kernels are compiled for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.compute.cuda.triton_tile import TritonTile
from engine.compute.cuda.triton_work import Workforce

H200 = 232_448  # bytes of shared memory that a program gets
PLAIN = TritonTile(128, 1, 128, group=8, num_kv_heads=2, key_dim=128, value_dim=128, block_size=16)


def test_a_tile_has_room_for_two_steps_of_keys() -> None:
    assert PLAIN.fitted(2, H200) == PLAIN
    fitted = PLAIN.fitted(2, 101_376)
    assert fitted == replace(PLAIN, keys=64) and fitted.stages(2, 101_376) == 2


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_the_sums_of_a_tile_fit_into_shared_memory(dim: int, itemsize: int) -> None:
    """There its finished rows are laid out anew; of Gemma 4's widest heads 128 rows took 262,144 bytes."""
    for kind in Workforce.of(132, itemsize).kinds:
        for heads in {1, kind.heads(8)}:
            tile = replace(PLAIN, queries=kind.queries, heads=heads, key_dim=dim, value_dim=dim)
            fitted = tile.fitted(itemsize, H200)
            assert fitted.rows * dim * 4 < H200
            assert fitted.queries * fitted.query_tiles == kind.queries
            assert fitted.programs == 2 * tile.head_tiles * fitted.query_tiles


def test_only_wide_tiles_are_divided() -> None:
    wide = replace(PLAIN, key_dim=512, value_dim=512)
    tiles = (replace(PLAIN, key_dim=256, value_dim=256), wide, replace(wide, pages="int8"))
    assert [tile.fitted(2, H200).query_tiles for tile in tiles] == [1, 2, 4]


@pytest.mark.parametrize("shared_memory", [H200, 166_912, 101_376])
@pytest.mark.parametrize("pages", ["plain", "int8"])
def test_latent_rows_leave_room_for_two_steps_on_every_gpu(shared_memory: int, pages: str) -> None:
    """A value is read with its key, so that a step takes half of what they would take apart."""
    for kind in Workforce.of(132, 2).kinds:
        tile = replace(
            PLAIN,
            queries=kind.queries,
            heads=kind.heads(20),
            keys=kind.keys,
            group=20,
            num_kv_heads=1,
            key_dim=576,
            value_dim=512,
            pages=pages,
            has_trees=kind.expects_trees,
            value_in_key=True,
        )
        fitted = tile.fitted(2, shared_memory)
        assert fitted.stages(2, shared_memory) >= 2 and fitted.padded_rest_dim == 64
        assert fitted.queries * fitted.query_tiles == kind.queries and fitted.rows * 512 <= 1 << 15
        apart = replace(fitted, value_in_key=False)
        assert apart.stages(2, shared_memory) <= fitted.stages(2, shared_memory)
