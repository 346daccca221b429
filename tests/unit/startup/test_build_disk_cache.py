"""Which K/V on disk counts as one's own, and when there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from config import load_settings
from engine.compute.attention.kv_tensors import KvTensors
from engine.startup.build_disk_cache import kv_fingerprint, open_disk_cache
from tests.support.factories import make_batcher
from tests.support.packed import load_tiny

CPU = torch.device("cpu")


def test_the_fingerprint_tells_all_that_decides_the_bytes_of_k_v() -> None:
    loaded, settings = load_tiny("llama"), load_settings([], environ={})
    kv = KvTensors(loaded.layers, 4, 16, torch.float32, CPU)
    half = KvTensors(loaded.layers, 4, 16, torch.bfloat16, CPU)
    small = KvTensors(loaded.layers, 4, 8, torch.float32, CPU)
    more = KvTensors(loaded.layers, 9, 16, torch.float32, CPU)
    in_bytes = [
        KvTensors(loaded.layers, 4, 16, torch.float32, CPU, kept)
        for kept in (torch.int8, torch.float8_e4m3fn)
    ]
    int8 = load_settings(["--quantization", "int8"], environ={})
    own = kv_fingerprint(settings, loaded, "weights", kv)
    assert kv_fingerprint(settings, loaded, "weights", more) == own
    others = [
        kv_fingerprint(settings, loaded, "other weights", kv),
        kv_fingerprint(int8, loaded, "weights", kv),
        kv_fingerprint(settings, loaded, "weights", half),
        kv_fingerprint(settings, loaded, "weights", small),
        *(kv_fingerprint(settings, loaded, "weights", kept) for kept in in_bytes),
        kv_fingerprint(settings, replace(loaded, kernels_used="others"), "weights", kv),
        kv_fingerprint(settings, replace(loaded, dtype=torch.bfloat16), "weights", kv),
        kv_fingerprint(settings, replace(loaded, max_model_len=17), "weights", kv),
    ]
    assert len({own, *others}) == 10


def test_without_a_directory_or_a_prefix_cache_nothing_is_kept(tmp_path: Path) -> None:
    loaded = load_tiny("llama")
    kv = KvTensors(loaded.layers, 4, 16, torch.float32, CPU)
    none = load_settings([], environ={})
    assert open_disk_cache(none, loaded, tmp_path, kv, make_batcher(prefix_caching=True)) is None
    given = load_settings(["--prefix-cache-dir", str(tmp_path / "kv")], environ={})
    assert open_disk_cache(given, loaded, tmp_path, kv, make_batcher(prefix_caching=False)) is None
    assert not (tmp_path / "kv").exists()
