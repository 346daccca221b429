"""--kv-cache-dtype: what a start makes of it, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import CacheSettings, load_settings
from engine.compute.recurrent.slot_states import LayerState
from engine.compute.runner import kept_kv
from engine.compute.runner.kept_kv import check_kept_kv, with_kept_kv
from engine.errors import StartRefused
from engine.startup.build import load_parts
from engine.startup.doctor import diagnose
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import as_loaded
from tests.support.tiny_models import save_tiny_model, tiny_model

INT8 = CacheSettings(kv_cache_dtype="int8")


def test_a_start_has_twice_the_room_and_the_doctor_foresees_it(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "llama")
    flags = [str(model), "--kv-cache-memory", "1MiB", "--max-num-seqs", "4"]
    plain = load_parts(load_settings(flags, WITHOUT_KERNELS)).info
    settings = load_settings([*flags, "--kv-cache-dtype", "int8"], WITHOUT_KERNELS)
    info, found = load_parts(settings).info, diagnose(settings)
    assert (plain.kv_dtype, info.kv_dtype, info.dtype) == ("float32", "int8", "float32")
    assert info.num_kv_blocks > 2 * plain.num_kv_blocks
    assert found.cache is not None and found.problems == []
    assert (found.cache.num_kv_blocks, found.cache.kv_bytes) == (info.num_kv_blocks, info.kv_bytes)


def test_without_the_flag_nothing_changes() -> None:
    loaded = as_loaded(tiny_model("llama"))
    assert with_kept_kv(loaded, CacheSettings()) is loaded
    check_kept_kv(loaded)


def test_models_that_cannot_have_it_are_refused() -> None:
    loaded = as_loaded(tiny_model("llama"))
    on_cuda = replace(loaded, device=torch.device("cuda", 0))
    with pytest.raises(StartRefused, match="--kv-cache-dtype int8: it is for CPUs, the model is on cuda:0"):
        with_kept_kv(on_cuda, INT8)
    odd = replace(loaded, layers=(replace(loaded.layers[0], key_dim=6),))
    with pytest.raises(StartRefused, match="heads of 6 numbers are no multiple of 4"):
        with_kept_kv(odd, INT8)
    recurrent = replace(loaded, states=(LayerState(0, 1, 1, (1,)),))
    with pytest.raises(StartRefused, match="the model keeps recurrent states"):
        with_kept_kv(recurrent, INT8)


def test_a_model_that_it_spoils_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = with_kept_kv(as_loaded(tiny_model("llama")), INT8)
    with caplog.at_level("INFO", "slipstream.model"):
        check_kept_kv(loaded)
    assert "K/V in 8-bit integers: logits changed by" in caplog.text
    monkeypatch.setattr(kept_kv, "_LIMIT", 0.0)
    with pytest.raises(StartRefused, match="--kv-cache-dtype int8: it changes the logits by"):
        check_kept_kv(loaded)
