"""The steps that Triton's attention is tried with, small for its interpreter and large for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.compute.attention.layer_kv import LayerKv
from tests.support.attention_noise import Chunk, Noise, random_tree, tree

# What is tried over K/V of 8 bits as well, of `matrix`.
OVER_BYTES = (
    *("decodes", "one prompt", "chunk after a long context", "sinks", "sinks, soft cap and window"),
    *("a tree beyond a tile", "a tree beyond a tile, window", "a tree beyond a tile, chunks"),
    *("window 17", "chunks of 7", "blocks of 1", "blocks of 5", "blocks of 64", "9 heads of each"),
    *("dims 80 and 80", "dims 128 and 128", "dims 24 and 8", "bfloat16", "float16"),
    *("latent rows", "latent rows, 20 heads in bfloat16", "latent rows, a tree beyond a tile"),
)


def mixed(scale: int) -> list[Chunk]:
    """Decodes, chains and trees under verification, prompts with and without a context."""
    rng = np.random.default_rng(0)
    return [
        Chunk(0),
        Chunk(5),
        Chunk(40 * scale),
        Chunk(63),
        Chunk(64),
        Chunk(0, 2 + 10 * scale),
        Chunk(30 * scale, 60 + scale),
        Chunk(17 * scale, 4),
        tree(9, [-1, -1, 0, 0, 1]),
        random_tree(rng, 25 * scale, 20),
        Chunk(3, 4),
    ]


def decodes(scale: int) -> list[Chunk]:
    """Contexts around the borders of blocks and of the steps that keys are read in."""
    return [Chunk(length) for length in (0, 1, 15, 16, 31, 62, 63, 64, 65, 127, 128, 50 * scale)]


def matrix(scale: int) -> dict[str, Noise]:
    """By name; `scale` times the interpreter's contexts."""
    steps = mixed(scale)
    plain = Noise(steps)
    found = {
        "decodes": Noise(decodes(scale)),
        "one token": Noise([Chunk(0)]),
        "one decode": Noise([Chunk(70 * scale)]),
        "one prompt": Noise([Chunk(0, 60 + 70 * scale)]),
        "chunk after a long context": Noise([Chunk(70 * scale, 50)]),
        "a tree beyond a tile": Noise([random_tree(np.random.default_rng(1), 30, 70)]),
        "a tree beyond a tile, window": Noise(
            [random_tree(np.random.default_rng(1), 30, 70)], LayerKv(1, 16, 16, 9)
        ),
        "a tree beyond a tile, chunks": Noise(
            [random_tree(np.random.default_rng(1), 30, 70)], LayerKv(1, 16, 16, chunk=12)
        ),
        "sinks": replace(plain, has_sinks=True),
        "sinks, soft cap and window": replace(
            plain, layer=LayerKv(2, 16, 16, 20), softcap=2.0, has_sinks=True
        ),
        "sinks of a long context": Noise([Chunk(700 * scale)], has_sinks=True),
        "soft cap": replace(plain, softcap=2.0),
        "soft cap and window": replace(plain, layer=LayerKv(2, 16, 16, 20), softcap=2.0),
    }
    for window in (1, 2, 17, 64, 100, 5000):
        found[f"window {window}"] = replace(plain, layer=LayerKv(2, 16, 16, window))
    for chunk in (1, 7, 64, 5000):
        found[f"chunks of {chunk}"] = replace(plain, layer=LayerKv(2, 16, 16, chunk=chunk))
    for block_size in (1, 5, 8, 32, 64, 1024):
        found[f"blocks of {block_size}"] = replace(plain, block_size=block_size)
    for group, heads in ((1, 2), (2, 2), (4, 2), (5, 1), (8, 1), (9, 1), (20, 1)):
        layer = LayerKv(heads, 16, 16)
        found[f"{group} heads of each"] = replace(plain, layer=layer, heads_of_each=group)
    for key_dim, value_dim in ((64, 64), (80, 80), (96, 96), (128, 128), (24, 8), (7, 40), (16, 260)):
        layer = LayerKv(1, key_dim, value_dim)
        found[f"dims {key_dim} and {value_dim}"] = replace(plain, layer=layer, heads_of_each=4)
    for dtype in (torch.bfloat16, torch.float16):
        found[str(dtype).removeprefix("torch.")] = replace(plain, dtype=dtype)
    latent, wide = (LayerKv(1, dim + dim // 8, dim, value_in_key=True) for dim in (32, 512))
    far = Noise([Chunk(70 * scale), Chunk(0, 9), Chunk(20, 60)], wide, 16, dtype=torch.bfloat16)
    return found | {
        "latent rows": replace(plain, layer=latent, heads_of_each=5),
        "latent rows, decodes": Noise(decodes(scale), latent, 40),
        "latent rows, 20 heads in bfloat16": replace(
            plain, layer=latent, heads_of_each=20, dtype=torch.bfloat16
        ),
        "latent rows, a tree beyond a tile": replace(
            found["a tree beyond a tile"], layer=latent, heads_of_each=17
        ),
        "latent rows as wide as DeepSeek's": far,
    }


def assert_close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """As close as numbers of `dtype` can be; `expected` was computed in float32."""
    assert ours.shape == expected.shape
    if dtype == torch.float32:
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
        return
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (ours - expected).norm() <= 2 * rounding * expected.norm()
    torch.testing.assert_close(ours, expected, atol=8 * rounding, rtol=4 * rounding)


def small(names: Sequence[str]) -> dict[str, Noise]:
    """Some of the matrix, for what is tried in many ways."""
    found = matrix(1)
    return {name: found[name] for name in names}
