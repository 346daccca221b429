"""A device by its number, and the sizes that a start derives from its memory, on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from config import Settings, load_settings
from engine.compute.runner.device import mark, seconds_between
from engine.compute.runner.memory_gauge import CudaMemoryGauge
from engine.errors import StartRefused
from engine.loop.engine_parts import EngineParts
from engine.startup.build import load_parts
from engine.startup.doctor import diagnose
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def settings_for(model: Path, *flags: str) -> Settings:
    plain = ("--speculative-method", "none", "--gpu-memory-utilization", "0.5", "--preemption", "recompute")
    return load_settings([str(model), *plain, *flags], {})


def load(settings: Settings) -> EngineParts:
    """On a thread of its own, whose current device is number 0 at first, as a server does."""
    with ThreadPoolExecutor(1) as target:
        return target.submit(load_parts, settings).result()


def test_a_device_is_taken_by_its_number(model: Path) -> None:
    last = torch.cuda.device_count() - 1
    settings = settings_for(model, "--device", f"cuda:{last}", "--num-kv-blocks", "64")
    parts = load(settings)
    assert parts.info.device == f"cuda:{last}"
    found = diagnose(settings)
    assert found.problems == [] and found.device is not None and found.device.device == f"cuda:{last}"


def test_a_device_that_is_not_there_is_refused(model: Path) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(StartRefused, match=f"^--device cuda:{count}: there is no such device"):
        load(settings_for(model, "--device", f"cuda:{count}"))


def test_sizes_follow_the_device(model: Path) -> None:
    """Of a tiny model they are the largest there are, on any GPU that this is tested on."""
    _, total = torch.cuda.mem_get_info(GPU)
    info = load(settings_for(model, "--device", "cuda:0")).info
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.kv_block_size) == (256, 8192, 64)
    assert all(origin.startswith("derived") for origin in info.size_origins.values())
    assert 0.2 * total < info.kv_bytes < 0.5 * total
    given = load(settings_for(model, "--device", "cuda:0", "--max-num-seqs", "5", "--kv-block-size", "16"))
    assert (given.info.max_num_seqs, given.info.kv_block_size) == (5, 16)


def test_a_gauge_measures_what_work_takes_at_once() -> None:
    gauge, size = CudaMemoryGauge(GPU), 64 << 20

    def work() -> None:
        for _ in range(3):
            torch.empty(size, dtype=torch.uint8, device=GPU)

    assert gauge.peak(work) == size
    kept = torch.empty(4 * size, dtype=torch.uint8, device=GPU)
    free, total = gauge.free_and_total()
    del kept
    assert gauge.free_and_total()[0] >= free + 4 * size and total > free


def test_time_is_measured_on_the_device_that_is_named() -> None:
    begin = mark(GPU)
    torch.ones(1 << 20, device=GPU).sum()
    assert 0 < seconds_between(begin, mark(GPU)) < 10
