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

INT8, FP8 = CacheSettings(kv_cache_dtype="int8"), CacheSettings(kv_cache_dtype="fp8")
BLOCK_SIZE = 16


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
    check_kept_kv(loaded, BLOCK_SIZE)


def test_models_that_cannot_have_it_are_refused() -> None:
    loaded = as_loaded(tiny_model("llama"))
    odd = replace(loaded, layers=(replace(loaded.layers[0], key_dim=6),))
    with pytest.raises(StartRefused, match="heads of 6 numbers are no multiple of 4"):
        with_kept_kv(odd, INT8)
    recurrent = replace(loaded, states=(LayerState(0, 1, 1, (1,)),))
    with pytest.raises(StartRefused, match="the model keeps recurrent states"):
        with_kept_kv(recurrent, INT8)


def test_who_has_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that convert them; who has none is told of the integers."""
    loaded = as_loaded(tiny_model("llama"))
    on_cuda = replace(loaded, device=torch.device("cuda", 0))
    with pytest.raises(StartRefused, match="fp8: it is for GPUs, the model is on cpu; int8 is served there"):
        with_kept_kv(loaded, FP8)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    refusal = r"fp8: cuda:0 is of compute capability \(8, 6\), it needs \(8, 9\); int8 is served there"
    with pytest.raises(StartRefused, match=refusal):
        with_kept_kv(on_cuda, FP8)
    assert with_kept_kv(on_cuda, INT8).kv_dtype is torch.int8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert with_kept_kv(on_cuda, FP8).kv_dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(("name", "kept"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_model_that_it_spoils_is_refused(
    name: str, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = replace(as_loaded(tiny_model("llama")), kept_kv=kept)
    with caplog.at_level("INFO", "slipstream.model"):
        check_kept_kv(loaded, BLOCK_SIZE)
    assert f"K/V in {name}: logits changed by" in caplog.text
    monkeypatch.setattr(kept_kv, "_LIMIT", 0.0)
    with pytest.raises(StartRefused, match=f"--kv-cache-dtype {name}: it changes the logits by"):
        check_kept_kv(loaded, BLOCK_SIZE)
