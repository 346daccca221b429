import ctypes
import weakref
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from engine.compute.attention.huge_pages import PAGE_BYTES, HugePages, fill_in_background


def test_tensors_are_zero_aligned_and_apart() -> None:
    pages = HugePages(4096)
    shapes = [(3, 5), (0, 4), (7,), (2, 2, 100), (4096,)]
    tensors = [pages.zeros(shape, torch.bfloat16) for shape in shapes]
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True), start=1):
        assert tensor.shape == shape and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert not tensor.any()
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, start=1):
        assert (tensor == number).all()


def test_a_region_starts_on_a_huge_page_and_serves_many() -> None:
    pages = HugePages(2 * PAGE_BYTES)
    first, second = (pages.zeros((PAGE_BYTES,), torch.int8) for _ in range(2))
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + PAGE_BYTES
    third = pages.zeros((5,), torch.int8)  # of another region: this one is full
    assert third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_what_outlives_its_pages_stays_usable() -> None:
    tensor = HugePages(1).zeros((1000, 1000), torch.float32)
    tensor += 1
    assert tensor.sum() == 1_000_000


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot be had"):
        HugePages(1).zeros((1 << 50,), torch.int8)


def test_filling_changes_no_number() -> None:
    num_bytes = 8 * PAGE_BYTES
    tensor = HugePages(num_bytes).zeros((num_bytes,), torch.uint8)
    tensor[::1000] = 7
    before = tensor.clone()
    fill_in_background([tensor]).join()
    assert torch.equal(tensor, before)


def test_filling_takes_turns_and_reaches_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def madvise(first: int, size: int, _advice: int) -> int:
        asked.append((first, size))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    pages = HugePages(64 * PAGE_BYTES)
    lengths = (2 * PAGE_BYTES + 10_000, PAGE_BYTES)
    tensors = [pages.zeros((length,), torch.uint8) for length in lengths]
    fill_in_background(tensors).join()
    start = tensors[0].data_ptr()
    second = 2 * PAGE_BYTES + 8192  # where the system's own page begins that the second tensor begins in
    assert [(first - start, size) for first, size in asked] == [
        (0, PAGE_BYTES),
        (second, PAGE_BYTES),
        (PAGE_BYTES, PAGE_BYTES),
        (second + PAGE_BYTES, 10_048 - 8192),
        (2 * PAGE_BYTES, 10_000),
    ]


def test_a_system_that_cannot_fill_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def madvise(first: int, _size: int, _advice: int) -> int:
        asked.append(first)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    tensors = [HugePages(1).zeros((20 * PAGE_BYTES,), torch.uint8)] * 2
    fill_in_background(tensors).join()
    assert len(asked) == 1


def test_memory_that_nobody_holds_any_more_is_neither_held_nor_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    begun, dropped = Event(), Event()

    def madvise(first: int, _size: int, _advice: int) -> int:
        asked.append(first)
        begun.set()
        assert dropped.wait(10)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    tensor = HugePages(1).zeros((20 * PAGE_BYTES,), torch.uint8)
    gone = Event()
    weakref.finalize(tensor, gone.set)
    thread = fill_in_background([tensor])
    assert begun.wait(10)
    del tensor
    assert not gone.is_set()  # what is being filled is there until it is
    dropped.set()
    thread.join(10)
    assert gone.is_set() and len(asked) == 1


def test_a_system_without_such_advice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    fill_in_background([torch.zeros(4)]).join()
