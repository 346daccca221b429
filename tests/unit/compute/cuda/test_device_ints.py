"""A step's integers in one buffer: where they lie, and what is left over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.cuda.device_ints import DeviceInts

CPU = torch.device("cpu")


def ints(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def test_each_array_is_found_by_name_and_the_rest_is_marked() -> None:
    arrays = DeviceInts({"tables": (3, 4), "lens": (3,), "none": (0, 2)}, CPU)
    arrays.put({"tables": ints(2, 3), "lens": ints(1), "none": ints(0, 2)})
    assert arrays["tables"].tolist() == [[0, 1, 2, -1], [3, 4, 5, -1], [-1] * 4]
    assert arrays["lens"].tolist() == [0, -1, -1]
    assert arrays["none"].shape == (0, 2)


def test_what_is_put_again_lies_at_the_same_address() -> None:
    arrays = DeviceInts({"tables": (3, 4), "lens": (3,)}, CPU)
    lens = arrays["lens"]
    arrays.put({"tables": ints(3, 4), "lens": ints(3)})
    arrays.put({"tables": ints(1, 1), "lens": ints(2) + 7})
    assert lens.tolist() == [7, 8, -1]
    assert arrays["tables"].tolist() == [[0, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert lens.data_ptr() == arrays["lens"].data_ptr()


def test_vector_loads_may_begin_at_each_array() -> None:
    arrays = DeviceInts({"a": (3,), "b": (33,), "c": (1,)}, CPU)
    offsets = [arrays[name].data_ptr() - arrays["a"].data_ptr() for name in "abc"]
    assert all(offset % 128 == 0 for offset in offsets) and len(set(offsets)) == 3


def test_what_is_too_large_is_refused_whole() -> None:
    arrays = DeviceInts({"tables": (3, 4), "lens": (3,)}, CPU)
    arrays.put({"tables": ints(3, 4), "lens": ints(3)})
    with pytest.raises(ValueError, match=r"lens are \(4,\), its place holds \(3,\)"):
        arrays.put({"tables": ints(1, 1), "lens": ints(4)})
    assert arrays["lens"].tolist() == [0, 1, 2]
