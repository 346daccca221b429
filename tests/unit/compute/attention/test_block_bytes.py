"""The bytes of a block: in place, all layers, and nothing of its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.compute.attention.block_bytes import DeviceBlockBytes, block_bytes_of
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from tests.support.packed import random_kv

LAYERS = (LayerKv(2, 8, 8), LayerKv(1, 16, 4))


def make_kv(seed: int) -> KvTensors:
    kv = KvTensors(LAYERS, 6, 4, torch.bfloat16, torch.device("cpu"))
    return random_kv(kv, torch.Generator().manual_seed(seed))


def test_a_block_goes_through_its_bytes_and_its_neighbours_stay() -> None:
    source, target, before = make_kv(1), make_kv(2), make_kv(2)
    outgoing, incoming = block_bytes_of(source), block_bytes_of(target)
    assert outgoing.block_bytes == source.block_bytes
    for pieces, places in zip(outgoing.outgoing([1, 4]), incoming.incoming([0, 3]), strict=True):
        assert sum(piece.nbytes for piece in pieces) == source.block_bytes
        for piece, place in zip(pieces, places, strict=True):
            place[:] = piece
    incoming.accept([0, 3])
    for got, old, sent in zip(target.tensors, before.tensors, source.tensors, strict=True):
        assert torch.equal(got[[0, 3]], sent[[1, 4]])
        assert torch.equal(got[[1, 2, 4, 5]], old[[1, 2, 4, 5]])


def test_a_devices_blocks_go_through_memory_of_the_host_in_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call is waited for before it comes back."""
    events: list[str] = []

    class Stream:
        def __init__(self, _device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            events.append("waited")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        events.append("entered")
        yield
        events.append("left")

    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("engine.compute.attention.block_bytes.in_stream", entered)
    source, target, before = make_kv(1), make_kv(2), make_kv(2)
    outgoing, incoming = DeviceBlockBytes(source), DeviceBlockBytes(target)
    assert outgoing.block_bytes == source.block_bytes
    for (piece,), (place,) in zip(outgoing.outgoing([1, 4]), incoming.incoming([0, 3]), strict=True):
        place[:] = piece
    incoming.accept([0, 3])
    assert events == ["entered", "left", "waited"] * 2
    for got, old, sent in zip(target.tensors, before.tensors, source.tensors, strict=True):
        assert torch.equal(got[[0, 3]], sent[[1, 4]])
        assert torch.equal(got[[1, 2, 4, 5]], old[[1, 2, 4, 5]])
