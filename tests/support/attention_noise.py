"""One attention layer over noise: the same step by any backend, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

from engine.compute.attention import AttentionBackend, AttentionContext, LayerCall
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv, Reach
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import StepInputs


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens behind `context` computed ones; the last of them are drafts, one a parent."""

    context: int
    count: int = 1
    parents: Sequence[int] = field(default=(), repr=False)


GROUPED = LayerKv(2, 16, 16)


@dataclass(frozen=True)
class Noise:
    """What is attended to what; `heads_of_each` heads share a K/V head."""

    chunks: Sequence[Chunk]
    layer: LayerKv = GROUPED
    heads_of_each: int = 3
    block_size: int = 16
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False


def tree(context: int, parents: Sequence[int]) -> Chunk:
    """A sequence that verifies a tree of drafts."""
    return Chunk(context, len(parents) + 1, parents)


def random_tree(rng: np.random.Generator, context: int, drafts: int, deepening: float = 0.6) -> Chunk:
    """The nearer `deepening` is to 1, the more the tree is a chain."""
    parents = [i - 1 if rng.random() < deepening else int(rng.integers(-1, i)) for i in range(drafts)]
    return tree(context, parents)


DRAFTS = [Chunk(0, 25), Chunk(30, 4), tree(18, [-1, 0, -1, 2, 0]), Chunk(50)]


def scattered_step(chunks: Sequence[Chunk], block_size: int, seed: int = 0) -> tuple[StepInputs, int]:
    """A step of sequences over scattered blocks, and the number of blocks in the pool."""
    needed = [-(-(chunk.context + chunk.count) // block_size) for chunk in chunks]
    num_blocks = sum(needed) + 2
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    parts = []
    for chunk, blocks in zip(chunks, needed, strict=True):
        stop = chunk.context + chunk.count
        own = [free.pop() for _ in range(blocks)]
        parts.append(Part([7] * stop, chunk.context, stop, own, chunk.parents))
    return pack_step(parts, block_size), num_blocks


def attend(
    noise: Noise,
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    poisoned: bool = False,
    kept: torch.dtype | None = None,
    wrong: Mapping[int, float] = MappingProxyType({}),
) -> torch.Tensor:
    """The layer's result, computed in `dtype` from numbers that `noise.dtype` holds, over K/V `kept` so.

    With `poisoned`, every slot that no token of the step may see is NaN. Keys and values of `wrong` tokens of
    the step have that number.
    """
    inputs, num_blocks = scattered_step(noise.chunks, noise.block_size)
    layer = noise.layer
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        numbers = scale * torch.randn(shape, generator=generator)
        return numbers.to(noise.dtype).to(device, dtype)  # in that order: both sides have the same

    with torch.inference_mode():
        kv = KvTensors((layer,), num_blocks, noise.block_size, dtype, device, kept)
        hidden = torch.from_numpy(hidden_slots(inputs, num_blocks, noise.block_size, layer.reach)).to(device)
        everywhere = []
        for dim in (layer.key_dim, layer.value_dim):
            tensor = draw(num_blocks, layer.num_kv_heads, noise.block_size, dim)
            by_slot = tensor.transpose(1, 2).flatten(0, 1)  # [slots, kv heads, dim]
            everywhere.append(torch.where(hidden[:, None, None], torch.nan, by_slot) if poisoned else by_slot)
        slots = torch.arange(num_blocks * noise.block_size, device=device)
        kv.write(0, kv.rows_of(slots, layer.num_kv_heads), *everywhere)
        num_tokens, num_heads = len(inputs.token_ids), layer.num_kv_heads * noise.heads_of_each
        query = draw(num_heads, num_tokens, layer.key_dim).transpose(0, 1)  # strided, as models have it
        key = draw(layer.num_kv_heads, num_tokens, layer.key_dim).transpose(0, 1)
        value = draw(num_tokens, layer.num_kv_heads, layer.value_dim)
        for token, number in wrong.items():
            key[token], value[token] = number, number
        context = AttentionContext(inputs, kv, backend)
        sinks = draw(num_heads, scale=3.0) if noise.has_sinks else None
        call = LayerCall(0, 0.3, layer.window, noise.softcap, layer.chunk, sinks)
        return context.attend(query, key, value, call).float().cpu()


def check_what_shows(
    noise: Noise,
    backend: AttentionBackend,
    device: torch.device,
    number: float,
    every: int = 1,
    kept: torch.dtype | None = None,
) -> None:
    """A token with this `number`, which is not finite, shows in those that see it, and in no other's bits.

    Asked of `every` so many tokens.
    """
    sound = attend(noise, backend, device, noise.dtype, kept=kept)
    for token in range(0, len(sound), every):
        found = attend(noise, backend, device, noise.dtype, kept=kept, wrong={token: number})
        sick = seers(noise.chunks, token, noise.layer.reach)
        assert [row for row, numbers in enumerate(found) if not numbers.isfinite().any()] == sick
        sound_rows = [row for row in range(len(sound)) if row not in sick]
        assert torch.equal(found[sound_rows], sound[sound_rows])


def seers(chunks: Sequence[Chunk], token: int, reach: Reach | None) -> list[int]:
    """The tokens of a step that see `token`, itself included."""
    start = 0
    while token >= start + chunks[0].count:
        start, chunks = start + chunks[0].count, chunks[1:]
    chunk = chunks[0]
    trunk = chunk.count - len(chunk.parents)
    paths: list[list[int]] = []
    for place in range(chunk.count):
        parent = place - 1 if place < trunk else trunk + chunk.parents[place - trunk]
        paths.append([*(paths[parent] if place else []), place])
    position = chunk.context + len(paths[token - start]) - 1
    return [
        start + place
        for place, path in enumerate(paths)
        if token - start in path and (reach is None or position >= reach.first(chunk.context + len(path) - 1))
    ]


def hidden_slots(inputs: StepInputs, num_blocks: int, block_size: int, reach: Reach | None) -> np.ndarray:
    """Which slots lie outside what the step's tokens see or write: [num_blocks * block_size]."""
    hidden = np.ones(num_blocks * block_size, dtype=np.bool_)
    for row, (query_len, kv_len) in enumerate(zip(inputs.query_lens, inputs.kv_lens, strict=True)):
        context = kv_len - query_len
        places = np.arange(0 if reach is None else max(0, reach.first(int(context))), kv_len)
        hidden[inputs.block_tables[row, places // block_size] * block_size + places % block_size] = False
    return hidden


def write_noise(kv: KvTensors, seed: int) -> None:
    """Put the same noise into every slot, whatever the K/V is kept in."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(kv.num_blocks * kv.block_size, device=kv.device)
    for index, layer in enumerate(kv.layers):
        key, value = (
            torch.randn(len(slots), layer.num_kv_heads, dim, generator=generator)
            for dim in (layer.key_dim, layer.value_dim)
        )
        rows = kv.rows_of(slots, layer.num_kv_heads)
        kv.write(index, rows, key.to(kv.device, kv.compute_dtype), value.to(kv.device, kv.compute_dtype))


def numbers_in(kv: KvTensors) -> list[torch.Tensor]:
    """Copies of the keys and values of every layer, each [num_blocks, num_kv_heads, block_size, dim]."""
    blocks = torch.arange(kv.num_blocks, device=kv.device)
    return [numbers.clone() for layer in range(len(kv.layers)) for numbers in kv.read(layer, blocks)]
